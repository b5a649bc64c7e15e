"""A lower bound of the makespan: a pipeline without bubbles, with micro-batches of the best composition."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gapless.runtime.core.micro_batch_columns import Ints
from gapless.runtime.simulation.cost.operators import Operators
from gapless.runtime.simulation.cost.stage_costs import MicroBatchShape, StageCosts

SIZE_STEP = 8  # tokens between two micro-batch sizes to try
MAX_PROMPTS = 16  # whole prompts in a micro-batch
CHUNKS = (128, 256, 512, 1024, 2048)  # tokens, tried for the attention of a prompt


def bubble_free_seconds(costs: StageCosts, inputs: Ints, outputs: Ints, batch: int) -> float:
    """Return a lower bound of the makespan of any policy, in seconds: the slowest stage's compute time without waits.

    With at most `batch` decodes in a micro-batch there are at least M = decodes / `batch` micro-batches, however their
    R tokens are distributed. The time of a stage without attention is a function f of a micro-batch's tokens. Let F be
    the lower convex envelope of f. Then M or more micro-batches take at least R times the minimum of F(n) / n over
    n <= R / M. Attention of decodes is added in full batches, attention of each prompt in chunks of its best size, and
    the LM head in full batches.

    Args:
        costs: Seconds of each stage.
        inputs: P of each request, in tokens.
        outputs: D of each request, in tokens.
        batch: B, the maximum number of decodes in a micro-batch.
    """
    decodes = int((outputs - 1).sum())
    tokens = int(inputs.sum()) + decodes
    context = float(((outputs - 1) * inputs + outputs * (outputs - 1) / 2).sum())
    fewest = decodes / batch
    prompts = {id(source): _prompt_attention(source, inputs) for source in costs.operators}
    seconds = []
    for stage, (layers, source) in enumerate(zip(costs.layers, costs.operators, strict=True)):
        attention = prompts[id(source)]
        if decodes:
            attention += fewest * source.decode_attention(batch, round(batch * context / decodes))
        head = min(source.linear("head", rows) / rows for rows in range(1, batch + 1)) * int(outputs.sum())
        fused = _fused(costs, stage, tokens, fewest, int(inputs.max()) + batch)
        seconds.append(fused + layers * attention + (head if stage == costs.num_stages - 1 else 0.0))
    return max(seconds)


def _fused(costs: StageCosts, stage: int, tokens: int, fewest: float, longest: int) -> float:
    """Return a lower bound of one stage's seconds without attention.

    Args:
        costs: Seconds of each stage.
        stage: The stage.
        tokens: All tokens.
        fewest: The minimum number of micro-batches that they are in.
        longest: Tokens of the longest prompt and its decodes.
    """
    sizes = np.array(_sizes(longest), np.int64)
    times = np.array([_without_attention(costs, stage, rows) for rows in sizes.tolist()])
    kept = lower_envelope(sizes.tolist(), times.tolist())
    largest = min(tokens / fewest if fewest else math.inf, float(sizes[-1]))
    tried = np.array([size for size in sizes[kept].tolist() if size <= largest] + [largest])
    return tokens * float((np.interp(tried, sizes[kept], times[kept]) / tried).min())


def _sizes(longest: int) -> list[int]:
    """Return the sizes of micro-batches that are tried: in small steps up to `longest`, then its multiples."""
    close = [1, *range(SIZE_STEP, longest + SIZE_STEP, SIZE_STEP)]
    return close + [close[-1] * times for times in range(2, MAX_PROMPTS + 1)]


def _without_attention(costs: StageCosts, stage: int, rows: int) -> float:
    """Return one stage's seconds for `rows` tokens, without attention."""
    parts = costs.breakdown(MicroBatchShape(((rows, 0),)), stage)
    return sum(parts.values()) - parts["attn"]


def _prompt_attention(source: Operators, inputs: Ints) -> float:
    """Return the attention seconds of all prompts in one layer, each whole or in chunks of its fastest size."""
    total = 0.0
    for length, count in zip(*(values.tolist() for values in np.unique(inputs, return_counts=True)), strict=True):
        best = source.chunk_attention(length, 0)
        for chunk in CHUNKS:
            if chunk < length:
                starts = range(0, length, chunk)
                best = min(best, sum(source.chunk_attention(min(chunk, length - start), start) for start in starts))
        total += count * best
    return total


def lower_envelope(x: Sequence[float], y: Sequence[float]) -> list[int]:
    """Return the indices of the points on the lower convex envelope; x must ascend."""
    kept: list[int] = []
    for place in range(len(x)):
        while len(kept) > 1:
            a, b = kept[-2], kept[-1]
            if (y[b] - y[a]) * (x[place] - x[a]) < (y[place] - y[a]) * (x[b] - x[a]):
                break
            kept.pop()
        kept.append(place)
    return kept
