"""A micro-batch as input of a stage: one ragged batch, chunks first, then decodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

Ints = np.ndarray  # of int64


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one request: a chunk, or a decode (length 1).

    `start` tokens of the request are in the KV cache already; this segment adds `length` at positions start ..
    start + length - 1. `blocks` lists the request's KV blocks in order, enough for `start + length` tokens.
    """

    start: int
    length: int
    blocks: Sequence[int] | Ints

    @property
    def context(self) -> int:
        """KV tokens that the last token of this segment attends to."""
        return self.start + self.length


def tables_of(segments: Sequence[Segment]) -> np.ndarray:
    """Return the block tables of segments, [segments, most blocks] int32, padded with zeros."""
    tables = np.zeros((len(segments), max((len(s.blocks) for s in segments), default=0)), dtype=np.int32)
    for row, segment in zip(tables, segments, strict=True):
        row[: len(segment.blocks)] = segment.blocks
    return tables


@dataclass(frozen=True, slots=True)
class Decodes:
    """The B decodes of a micro-batch as arrays. Iterating yields one `Segment` per decode.

    `starts` is the number of tokens already in the KV cache, [B] int64. `tables` are the block tables, [B, M] int32:
    row b starts with the blocks of decode b, in order; the rest of the row is not read.
    """

    starts: np.ndarray
    tables: np.ndarray

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> Decodes:
        """Convert segments of length 1."""
        assert all(segment.length == 1 for segment in segments)
        return cls(np.array([s.start for s in segments], dtype=np.int64), tables_of(segments))

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[Segment]:
        return (Segment(start, 1, table) for start, table in zip(self.starts.tolist(), self.tables, strict=True))


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """T tokens of several requests, fused for the linear layers, separate for attention (paper 4.3.1).

    Rows 0 .. T-1 are the chunks' tokens in order, then one row per decode. `sample_rows` are the rows that need logits,
    ascending: all decodes, the last row of each chunk that completes its prompt, and all rows of a chunk whose prompt
    log-probabilities are requested. With sliding-window layers, `others` has the same rows with the block tables of the
    other layer groups.
    """

    token_ids: Ints  # [T]
    chunks: Sequence[Segment]
    decodes: Decodes
    sample_rows: Ints  # [R]
    others: Sequence[RaggedBatch] = ()

    @classmethod
    def of(
        cls, token_ids: Sequence[int], chunks: Sequence[Segment], decodes: Sequence[Segment], sample_rows: Sequence[int]
    ) -> RaggedBatch:
        """Make a batch from lists."""
        ids, rows = (np.array(numbers, dtype=np.int64) for numbers in (token_ids, sample_rows))
        return cls(ids, chunks, Decodes.of(decodes), rows)

    @property
    def num_tokens(self) -> int:
        """T, the tokens of all chunks and decodes."""
        return len(self.token_ids)

    @property
    def num_chunk_tokens(self) -> int:
        """The number of tokens of all chunks. Their rows precede the decodes."""
        return len(self.token_ids) - len(self.decodes)

    @property
    def chunk_rows(self) -> list[slice]:
        """The rows of each chunk."""
        ends = accumulate((chunk.length for chunk in self.chunks), initial=0)
        return [slice(first, last) for first, last in pairwise(ends)]

    def sampled(self) -> RaggedBatch:
        """Return the batch of only `sample_rows`, in order: the last rows of chunks, and all decodes."""
        chunks: list[Segment] = []
        if self.chunks:
            ends = np.cumsum([chunk.length for chunk in self.chunks])
            found = np.searchsorted(self.sample_rows, [0, *ends])
            for chunk, end, length in zip(self.chunks, ends.tolist(), np.diff(found).tolist(), strict=True):
                if length:
                    assert end - length in self.sample_rows, "the sampled rows of a chunk are its last"
                    chunks.append(Segment(chunk.context - length, length, chunk.blocks))
        rows = self.sample_rows
        return RaggedBatch(self.token_ids[rows], chunks, self.decodes, np.arange(len(rows)))
