"""SARATHI (arXiv 2308.16369, section 4): one chunk of one prompt, with piggybacked decodes."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from mypy_extensions import mypyc_attr

from ...core.micro_batch import MicroBatch
from ..chunked import ChunkedScheduler


@mypyc_attr(allow_interpreted_subclasses=True)
class Sarathi(ChunkedScheduler):
    """Decode-maximal batching (4.3): one chunk and up to B - 1 ready decodes; without a prompt, up to B decodes.

    Chunk and decodes together have at most C tokens (`chunk`), a multiple of the tile (4.4). The last chunk of a prompt
    takes all remaining tokens: cutting it to whole tiles would pad as many rows and take one more micro-batch.
    Chunks of one prompt may follow each other through the pipeline, because the next chunk needs no sampled token.
    """

    def fill(self, batch: MicroBatch) -> None:
        """Take decodes, then a chunk of the next prompt that fills up to `chunk` tokens."""
        prompt = self.next_prompt()
        self.take_decodes(batch, min(self.limits.batch, self.chunk) - 1 if prompt else self.limits.batch)
        if prompt:
            self.take_chunk(batch, prompt, self.chunk_length(prompt.remaining_prefill, len(batch.decodes)))

    def chunk_length(self, remaining: int, num_decodes: int) -> int:
        """Return the chunk length for a prompt with `remaining` tokens, alongside `num_decodes` decodes."""
        whole = self.chunk - self.chunk % self.limits.tile
        return min(remaining, (whole if whole > num_decodes else self.chunk) - num_decodes)
