"""FasterTransformer's request-level scheduling (paper 4.1): a batch enters together and leaves together."""

from __future__ import annotations

from collections import deque

from ...conf.policies import SchedulerConfig
from ..blocks import BlockPool
from ..micro_batch import MicroBatch
from ..request import Request
from .base import Limits, Scheduler


class RequestLevel(Scheduler):
    """Up to B x depth requests enter together, dealt into `depth` groups of up to B, a micro-batch each.

    A group prefills its prompts whole and then decodes until all are done; the next batch waits for every group. The
    cache of a request is set aside for its longest output, so that nothing is ever preempted.
    """

    def __init__(self, config: SchedulerConfig, limits: Limits, pool: BlockPool) -> None:
        super().__init__(config, limits, pool)
        self._groups: deque[list[Request]] = deque()

    def reserved_tokens(self, request: Request) -> int:
        return request.max_len

    def fill(self, batch: MicroBatch) -> None:
        if not self.running:
            self._enter()
        for _ in range(len(self._groups)):
            group = self._groups.popleft()
            group[:] = [r for r in group if not r.is_finished]
            if group:
                self._groups.append(group)
            if group and not any(r.in_flight for r in group):
                for request in group:
                    if request.remaining_prefill:
                        self.take_chunk(batch, request, request.remaining_prefill)
                if not batch.chunks:
                    for request in group:
                        self.take_decode(batch, request)
                return

    def _enter(self) -> None:
        entered = []
        while request := self.admit():
            entered.append(request)
        size = -(-len(entered) // self.limits.depth)
        self._groups = deque(entered[i : i + size] for i in range(0, len(entered), size or 1))
