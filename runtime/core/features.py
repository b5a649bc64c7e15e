"""What a stage's time for a micro-batch is linear in."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from collections.abc import Sequence

from .columns import entries, total
from .run_record import MicroBatchRecord

Features = tuple[float, ...]

# Linear layers cost by token, attention by pairs of a token and what it sees: of a chunk its prefix and its own
# triangle, of a decode its context; the LM head costs by row that samples. The constant is what any micro-batch costs,
# the reading of the weights first of all.
FEATURES = ("constant", "tokens", "chunk_prefix", "chunk_squared", "decode_context", "sampled_rows")


def features(micro_batch: MicroBatchRecord) -> Features:
    """What `FEATURES` names, of a micro-batch."""
    starts: bytes = micro_batch.decodes.start_column
    tokens = entries(starts)
    context = total(starts) + tokens
    prefix = squared = 0
    for chunk in micro_batch.chunks:
        length: int = chunk.tokens
        tokens += length
        prefix += chunk.start * length
        squared += length * length
    return 1.0, tokens, prefix, squared, context, micro_batch.sampled_rows


def weigh(weights: Sequence[float], row: Features) -> float:
    """Seconds of a stage whose time has these `weights`."""
    seconds = 0.0
    for weight, value in zip(weights, row):  # noqa: B905  (as it stands, mypyc makes it a plain loop)
        seconds += weight * value
    return seconds


def weigh_all(stages: Sequence[Sequence[float]], row: Features) -> list[float]:
    """Seconds of each stage."""
    return [weigh(weights, row) for weights in stages]
