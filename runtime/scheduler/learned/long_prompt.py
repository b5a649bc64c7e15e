"""Cuts a long prompt into chunks of equal predicted time."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

import math

from .linear_cost import LinearCost

_LEAST_OVERHEAD = 0.02  # share of a chunk's time; below it, longer chunks gain next to nothing


def chunk_count(seconds: float, overhead: float, num_stages: int) -> float:
    """Return the number of equal chunks that minimizes the TTFT of a lone prompt.

    n chunks through P stages take (n + P - 1) x (W / n + c), where W is `seconds`, the whole prompt's time in the
    slowest stage, and c > 0 is `overhead`, the fixed seconds per chunk. The minimum is at n = sqrt((P - 1) W / c).
    Overhead is at least a `_LEAST_OVERHEAD` share: a new request waits for a chunk, so chunks must not be too long.
    """
    return max(1.0, math.sqrt((num_stages - 1) * seconds / overhead), seconds * _LEAST_OVERHEAD / overhead)


def next_chunk(cost: LinearCost, prefix: int, remaining: int, seconds: float, at_most: bool) -> int:
    """Return the tokens of the next chunk, which takes an equal share of the prompt's remaining time.

    The share is the one nearest to `seconds`, or with `at_most` not above it. So the last chunk takes as long as the
    others and leaves no tiny tail.
    """
    total = cost.of_tokens(prefix, prefix + remaining)
    count = total / seconds
    number = math.ceil(count - 1e-6) if at_most else round(count)
    if number <= 1:
        return remaining
    return min(remaining, max(1, cost.longest_chunk(total / number, prefix)))
