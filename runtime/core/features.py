"""Features of a micro-batch for the linear model of a stage's time."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .columns import entries, total
from .run_record import MicroBatchRecord


class Features(NamedTuple):
    """Features of one micro-batch. A stage's weights have the same fields, in seconds per unit.

    Linear layers cost time per token, attention per (query, key) pair, and the LM head per sampled row. The constant
    cost per micro-batch is mainly the time to read the weights.
    """

    constant: float  # 1
    tokens: float  # of chunks and decodes
    chunk_prefix: float  # chunk length x prefix, summed over the chunks
    chunk_squared: float  # chunk length squared, summed over the chunks
    decode_context: float  # KV tokens that the decodes attend to, summed
    sampled_rows: float


FEATURES = Features._fields


def features(micro_batch: MicroBatchRecord) -> Features:
    """Return the features of a micro-batch."""
    starts: bytes = micro_batch.decodes.start_column
    tokens = entries(starts)
    context = total(starts) + tokens
    prefix = squared = 0
    for chunk in micro_batch.chunks:
        length: int = chunk.tokens
        tokens += length
        prefix += chunk.start * length
        squared += length * length
    return Features(1.0, tokens, prefix, squared, context, micro_batch.sampled_rows)


def weigh(weights: Sequence[float], row: Features) -> float:
    """Return the predicted seconds of a stage with these `weights`."""
    seconds = 0.0
    for place, weight in enumerate(weights):
        seconds += weight * row[place]
    return seconds


def weigh_all(stages: Sequence[Sequence[float]], row: Features) -> list[float]:
    """Return the predicted seconds of each stage, given the weights of each."""
    return [weigh(weights, row) for weights in stages]
