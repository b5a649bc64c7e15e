"""A micro-batch as a stage computes it: one ragged batch, chunks first, then decodes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one request: a chunk, or a decode (length 1).

    `start` tokens of the request lie in the KV cache already; this segment adds `length` at positions start ..
    start + length - 1. `blocks` lists the request's KV blocks in order, enough for `start + length` tokens.
    """

    start: int
    length: int
    blocks: Sequence[int]

    @property
    def context(self) -> int:
        """KV tokens that the last token of this segment attends to."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """T tokens of several requests, fused for the linear layers, apart for attention (paper 4.3.1).

    Rows 0 .. T-1 are the chunks' tokens in order, then one row a decode. `sample_rows` are the rows whose logits are
    wanted, ascending: each decode's, and the last row of each chunk that ends its prompt.
    """

    token_ids: Sequence[int]  # T
    chunks: Sequence[Segment]
    decodes: Sequence[Segment]
    sample_rows: Sequence[int]  # R

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_chunk_tokens(self) -> int:
        return len(self.token_ids) - len(self.decodes)

    def sampled(self) -> RaggedBatch:
        """Return the batch of `sample_rows` alone, in their order: of a chunk the last rows, and each decode."""
        first, chunks = 0, []
        for chunk in self.chunks:
            last = first + chunk.length
            length = bisect_left(self.sample_rows, last) - bisect_left(self.sample_rows, first)
            if length:
                assert last - length in self.sample_rows, "the sampled rows of a chunk are its last"
                chunks.append(Segment(chunk.context - length, length, chunk.blocks))
            first = last
        token_ids = [self.token_ids[row] for row in self.sample_rows]
        return RaggedBatch(token_ids, chunks, self.decodes, range(len(token_ids)))
