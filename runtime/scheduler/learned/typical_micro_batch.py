"""Running means over recent micro-batches."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from ...core.features import Features
from ...core.micro_batch import MicroBatch

_NEWEST_WEIGHT = 1 / 32  # of the newest micro-batch in the means
_NEWEST_WEIGHT_OF_FULLNESS = 1 / 256  # lower, because a change of the depth costs a bubble
FULL = 0.9  # mean share of a whole chunk from which micro-batches count as full


class TypicalMicroBatch:
    """Running means of the contents of micro-batches.

    `decodes`, `context` (KV tokens that the decodes attend to) and `prefix` (of a prompt token) are over micro-batches
    with prompts. `fullness` is over all micro-batches: prompt tokens as a share of a whole chunk.
    """

    def __init__(self) -> None:
        self.decodes = self.context = self.prefix = 0.0
        self.fullness = 1.0

    def observe(self, batch: MicroBatch, context: int, whole_chunk: float, number: int) -> None:
        """Learn from a micro-batch that has just been filled.

        Args:
            batch: the micro-batch.
            context: KV tokens that its decodes attend to, in total.
            whole_chunk: prompt tokens that would have filled it.
            number: the micro-batch's number, from 0.
        """
        tokens = batch.num_prefill_tokens
        share = min(1.0, tokens / max(1.0, whole_chunk))
        self.fullness += _NEWEST_WEIGHT_OF_FULLNESS * (share - self.fullness)
        if not batch.chunks:
            return
        prefix = sum([chunk.start * chunk.length for chunk in batch.chunks]) / tokens
        weight = max(_NEWEST_WEIGHT, 1 / (1 + number))
        self.decodes += weight * (len(batch.decodes) - self.decodes)
        self.context += weight * (context - self.context)
        self.prefix += weight * (prefix - self.prefix)

    @property
    def is_full(self) -> bool:
        """Whether prompts fill micro-batches."""
        return self.fullness >= FULL

    def with_chunk(self, chunk: float) -> Features:
        """Return the features of a micro-batch of these decodes and a chunk of `chunk` tokens on this prefix."""
        tokens = chunk + self.decodes
        return Features(1.0, tokens, chunk * self.prefix, chunk * chunk, self.context, self.decodes)
