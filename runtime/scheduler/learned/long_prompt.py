"""Into how many chunks a long prompt is cut, so that each takes the same predicted time."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

import math

from .linear_cost import LinearCost

_LEAST_OVERHEAD = 0.02  # share of a chunk's time: where the overhead is less, longer chunks gain next to nothing


def chunk_count(seconds: float, overhead: float, num_stages: int) -> float:
    """Return the number of equal chunks with which a prompt that is alone has its first token the soonest.

    n chunks through P stages take (n + P - 1) times W / n + c: W are `seconds` of the whole prompt in the slowest
    stage, c is the `overhead` of a chunk in seconds, above 0. That is least at n = sqrt((P - 1) W / c). No chunk is so
    long that its overhead is a share below `_LEAST_OVERHEAD`, because a request that comes meanwhile waits for a chunk.
    """
    return max(1.0, math.sqrt((num_stages - 1) * seconds / overhead), seconds * _LEAST_OVERHEAD / overhead)


def next_chunk(cost: LinearCost, prefix: int, remaining: int, seconds: float, at_most: bool) -> int:
    """Return the tokens of the next chunk, which adds an equal share of the time that is left of a prompt.

    The shares are the nearest to `seconds`, or with `at_most` none is longer: so what is left for the last chunk is
    as long as the others, neither a tiny tail nor a rest of its own.
    """
    total = cost.of_tokens(prefix, prefix + remaining)
    count = total / seconds
    number = math.ceil(count - 1e-6) if at_most else round(count)
    if number <= 1:
        return remaining
    return min(remaining, max(1, cost.longest_chunk(total / number, prefix)))
