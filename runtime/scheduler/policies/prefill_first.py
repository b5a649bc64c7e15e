"""The original policy of vLLM and TGI: prefills before decodes, in separate micro-batches."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from typing import ClassVar

from mypy_extensions import mypyc_attr

from ....conf.policies import PrefillFirstConfig
from ...core.block_pool import BlockPool
from ...core.micro_batch import MicroBatch
from ...core.request import Request
from ..base import Scheduler
from ..limits import Limits


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefillFirst(Scheduler):
    """Runs a prefill-only batch whenever a waiting prompt fits, else a batch of all ready decodes.

    A prefill-only batch contains whole prompts of up to `max_prefill_tokens` in total; a longer prompt runs alone. Any
    batch has at most B requests.
    """

    cuts_prompts: ClassVar[bool] = False

    def __init__(self, config: PrefillFirstConfig, limits: Limits, pool: BlockPool) -> None:
        super().__init__(config, limits, pool)
        self.max_prefill_tokens = config.max_prefill_tokens

    def fill(self, batch: MicroBatch) -> None:
        """Take whole prompts while they fit; if none does, decodes."""
        room = self.max_prefill_tokens
        while len(batch.chunks) < self.limits.batch and (prompt := self._fitting(room, alone=not batch.chunks)):
            room -= prompt.remaining_prefill
            self.take_chunk(batch, prompt, prompt.remaining_prefill)
        if not batch.chunks:
            self.take_decodes(batch, self.limits.batch)

    def _fitting(self, room: int, alone: bool) -> Request | None:
        """Admit the next waiting prompt if it has at most `room` tokens, or any number if it enters alone."""
        prompt = self.waiting.head()
        return self.admit() if prompt and (alone or prompt.remaining_prefill <= room) else None
