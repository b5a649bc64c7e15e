"""Orca at its best (paper 5.2): iteration-level scheduling where one whole prompt overlaps with ongoing decodes."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from mypy_extensions import mypyc_attr

from ...core.micro_batch import MicroBatch
from ..base import Scheduler


@mypyc_attr(allow_interpreted_subclasses=True)
class OrcaBest(Scheduler):
    """Every ready decode plus the whole prompt of at most one new request, B requests at most."""

    def fill(self, batch: MicroBatch) -> None:
        """Take decodes up to the batch size, and the next prompt whole."""
        prompt = self.next_prompt()
        self.take_decodes(batch, self.limits.batch - 1 if prompt else self.limits.batch)
        if prompt:
            self.take_chunk(batch, prompt, prompt.remaining_prefill)
