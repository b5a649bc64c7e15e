"""SARATHI (arXiv 2308.16369, section 4): one chunk of one prompt, and the decodes that ride along with it."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from mypy_extensions import mypyc_attr

from ...core.micro_batch import MicroBatch
from ..chunked import ChunkedScheduler


@mypyc_attr(allow_interpreted_subclasses=True)
class Sarathi(ChunkedScheduler):
    """Decode-maximal batching (4.3): one chunk and up to B - 1 ready decodes; without a prompt, up to B decodes.

    Chunk and decodes together come to at most C tokens, `chunk`, and to a multiple of the tile (4.4). The last chunk of
    a prompt is all that is left of it: cut to whole tiles, it would pad as many rows and take one micro-batch more.
    Chunks of one prompt may follow each other through the pipeline, because the next chunk needs no sampled token.
    """

    def fill(self, batch: MicroBatch) -> None:
        """Take decodes, then a chunk of the next prompt that fills up to `chunk` tokens."""
        prompt = self.next_prompt()
        self.take_decodes(batch, min(self.limits.batch, self.chunk) - 1 if prompt else self.limits.batch)
        if prompt:
            self.take_chunk(batch, prompt, self.chunk_length(prompt.remaining_prefill, len(batch.decodes)))

    def chunk_length(self, remaining: int, num_decodes: int) -> int:
        """Return the tokens of the chunk that goes with `num_decodes` decodes, of a prompt with `remaining` tokens."""
        whole = self.chunk - self.chunk % self.tile
        return min(remaining, (whole if whole > num_decodes else self.chunk) - num_decodes)
