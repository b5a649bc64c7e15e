"""SARATHI (arXiv 2308.16369, section 4): one chunk of one prompt, and the decodes that ride along with it."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from collections.abc import Sequence

from mypy_extensions import mypyc_attr

from ....conf.policies import SarathiConfig
from ...core.block_pool import BlockPool
from ...core.messages import Span
from ...core.micro_batch import MicroBatch
from ...core.request import Request
from ...core.run_record import MicroBatchRecord
from ..base import Limits, Scheduler
from ..learned.chunk_picker import ChunkPicker


@mypyc_attr(allow_interpreted_subclasses=True)
class Sarathi(Scheduler):
    """Decode-maximal batching: up to B - 1 ready decodes and one chunk; without a prompt, up to B decodes.

    Chunk and decodes together come to at most `chunk` tokens and to a multiple of the tile (4.4). The last chunk of a
    prompt is all that is left of it: cut to whole tiles it would pad as many rows, and take a micro-batch more. Chunks
    of one prompt may follow each other through the pipeline: the next one needs no sampled token. `chunk=auto` learns
    from spans what saturates a stage.
    """

    def __init__(self, config: SarathiConfig, limits: Limits, pool: BlockPool) -> None:
        super().__init__(config, limits, pool)
        self.tile = config.tile or limits.tile
        self.picker = ChunkPicker(config.chunk, self.tile, limits.stages)

    def fill(self, batch: MicroBatch) -> None:
        if note := self.picker.update(self):
            self.notes.append(note)
        prompt = self.next_prompt()
        self.take_decodes(batch, min(self.limits.batch, self.picker.chunk) - 1 if prompt else self.limits.batch)
        if prompt and prompt.remaining_prefill and prompt.id in self.running:
            self.take_chunk(batch, prompt, self.chunk_length(prompt.remaining_prefill, len(batch.decodes)))
        self.picker.filled(batch)

    def chunk_length(self, remaining: int, num_decodes: int) -> int:
        """Tokens of the chunk that goes with so many decodes (paper 4.4)."""
        tokens = self.picker.chunk
        whole = tokens - tokens % self.tile
        return min(remaining, (whole if whole > num_decodes else tokens) - num_decodes)

    def observe(self, micro_batch: MicroBatchRecord, spans: Sequence[Span]) -> None:
        self.picker.observe(micro_batch, spans)

    def finish(self, request: Request, reason: str) -> None:
        self.picker.finished(request)
        super().finish(request, reason)
