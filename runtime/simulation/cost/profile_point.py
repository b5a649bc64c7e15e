"""A micro-batch that a profile measures: a chunk, decodes, or both."""

from __future__ import annotations

from typing import NamedTuple

from .stage_costs import MicroBatchShape


class Point(NamedTuple):
    """One micro-batch: a chunk of `chunk` tokens on a KV `prefix`, and `decodes` that attend to `context` tokens each.

    The chunk samples a token if `sample` is 1; decodes always do.
    """

    chunk: int = 0
    prefix: int = 0
    decodes: int = 0
    context: int = 0
    sample: int = 0

    @property
    def rows(self) -> int:
        """Number of tokens in the micro-batch."""
        return self.chunk + self.decodes

    @property
    def shape(self) -> MicroBatchShape:
        """The work of the micro-batch for a stage."""
        chunks = ((self.chunk, self.prefix),) if self.chunk else ()
        return MicroBatchShape(chunks, self.decodes, self.decodes * self.context, self.decodes + self.sample)

    def slots(self, block_size: int) -> int:
        """Return the KV slots that the requests own."""
        blocks = -(-(self.prefix + self.chunk) // block_size) + self.decodes * -(-self.context // block_size)
        return blocks * block_size
