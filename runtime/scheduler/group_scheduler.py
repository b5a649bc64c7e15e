"""Base class of request-level policies: requests enter in groups that stay together until all are done."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from collections import deque
from typing import ClassVar

from mypy_extensions import mypyc_attr

from ...conf.policies import SchedulerConfig
from ..core.block_pool import BlockPool
from ..core.micro_batch import MicroBatch
from ..core.request import Request
from .base import Scheduler
from .limits import Limits

_NONE: frozenset[int] = frozenset()


@mypyc_attr(allow_interpreted_subclasses=True)
class GroupScheduler(Scheduler):
    """A group prefills its prompts whole in one micro-batch, then decodes in one micro-batch per iteration.

    Groups take turns. Blocks for each request's maximum length are reserved, so that nothing is preempted.
    """

    cuts_prompts: ClassVar[bool] = False

    def __init__(self, config: SchedulerConfig, limits: Limits, pool: BlockPool) -> None:
        super().__init__(config, limits, pool)
        self.groups: deque[list[Request]] = deque()

    def enter(self) -> None:
        """Admit requests into new groups, as the policy's rule allows."""
        raise NotImplementedError

    def reserved_tokens(self, request: Request) -> int:
        """Return the request's maximum length, so that no request of a group is preempted."""
        return request.max_len

    def make_room(self) -> None:
        """Preempt nothing: a group stays together."""

    def restart(self) -> tuple[int, int]:
        """Drop all groups and KV state; their requests are admitted again."""
        self.groups.clear()
        return super().restart()

    def fill(self, batch: MicroBatch) -> None:
        """Take the prompts or the decodes of the next group that does not wait for tokens in flight."""
        live = ([r for r in group if not r.is_finished] for group in self.groups)
        self.groups = deque(group for group in live if group)
        self.enter()
        ready = {r.id for r in self.ready} if self.limits.looks_ahead else _NONE
        for _ in range(len(self.groups)):
            group = self.groups[0]
            self.groups.rotate(-1)
            if not any(r.in_flight and r.id not in ready for r in group):
                self._take(batch, group)
                return

    def _take(self, batch: MicroBatch, group: list[Request]) -> None:
        for request in group:
            if request.remaining_prefill:
                self.take_chunk(batch, request, request.remaining_prefill)
        if not batch.chunks:
            for request in group:
                self.take_decode(batch, request)

    def admit_group(self, most: int, most_blocks: int) -> list[Request]:
        """Admit up to `most` waiting requests that reserve up to `most_blocks` KV blocks in total, and return them.

        A request that needs more blocks forms a group of its own.
        """
        group: list[Request] = []
        blocks = 0
        while len(group) < most and (waiting := self.waiting.head()):
            blocks += self.pool.blocks_for(self.reserved_tokens(waiting))
            if (group and blocks > most_blocks) or not (request := self.admit()):
                break
            group.append(request)
        return group
