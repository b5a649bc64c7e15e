"""How fast a pipeline could be: no bubble anywhere, and micro-batches of the best composition."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ..cost.operators import Operators
from ..cost.stage_costs import MicroBatchShape, StageCosts

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
ROWS = 8  # micro-batches are tried at multiples of it
PROMPTS = 16  # whole ones of a micro-batch, at most
CHUNKS = (128, 256, 512, 1024, 2048)


def bubble_free_seconds(costs: StageCosts, inputs: Ints, outputs: Ints, batch: int) -> float:
    """A lower bound of the makespan of any policy: compute time of the slowest stage if it never waits.

    With at most `batch` decodes a micro-batch there are at least M = decodes / `batch` of them, however the R tokens
    are dealt. What a stage takes but for attention is a function f of a micro-batch's tokens; by the lower convex
    envelope F of f, M or more micro-batches take R times the least F(n) / n for n up to R / M. Attention of decodes is
    counted in full batches, that of each prompt in chunks of its best size, the LM head in full batches.

    Args:
        costs: seconds of each stage.
        inputs, outputs: P and D of each request, tokens.
        batch: B, most decodes of a micro-batch.
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


def _fused(costs: StageCosts, stage: int, tokens: int, fewest: float, most: int) -> float:
    """Seconds of one stage for `tokens` in `fewest` micro-batches or more; attention left out."""
    sizes = np.array(_sizes(most), np.int64)
    times = np.array([_without_attention(costs, stage, rows) for rows in sizes.tolist()])
    kept = lower_envelope(sizes, times)
    largest = min(tokens / fewest if fewest else math.inf, float(sizes[-1]))
    tried = np.array([size for size in sizes[kept].tolist() if size <= largest] + [largest])
    return tokens * float((np.interp(tried, sizes[kept], times[kept]) / tried).min())


def _sizes(most: int) -> list[int]:
    """Tokens of micro-batches that are tried: closely up to a long prompt and its decodes, then of several prompts."""
    close = [1, *range(ROWS, most + ROWS, ROWS)]
    return close + [close[-1] * times for times in range(2, PROMPTS + 1)]


def _without_attention(costs: StageCosts, stage: int, rows: int) -> float:
    parts = costs.breakdown(MicroBatchShape(((rows, 0),)), stage)
    return sum(parts.values()) - parts["attn"]


def lower_envelope(x: Ints, y: Floats) -> list[int]:
    """Of points at rising x, the indices of those on the lower convex envelope."""
    kept: list[int] = []
    for place in range(len(x)):
        while len(kept) > 1:
            a, b = kept[-2], kept[-1]
            if (y[b] - y[a]) * (x[place] - x[a]) < (y[place] - y[a]) * (x[b] - x[a]):
                break
            kept.pop()
        kept.append(place)
    return kept


def _prompt_attention(source: Operators, inputs: Ints) -> float:
    """Attention of all prompts in one layer, each whole or in chunks of whatever size takes least."""
    total = 0.0
    for length, count in zip(*(values.tolist() for values in np.unique(inputs, return_counts=True)), strict=True):
        best = source.chunk_attention(length, 0)
        for chunk in CHUNKS:
            if chunk < length:
                starts = range(0, length, chunk)
                best = min(best, sum(source.chunk_attention(min(chunk, length - start), start) for start in starts))
        total += count * best
    return total
