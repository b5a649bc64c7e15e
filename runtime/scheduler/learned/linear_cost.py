"""The predicted time of one stage, linear in features, and the longest chunk that fits into a time."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

import math
from collections.abc import Sequence

from ...core.features import Features, weigh

TOKENS_FOR_TIME = Features(0.0, 1.0, 0.0, 0.0, 0.0, 0.0)  # weights before anything is known
UNBOUNDED = 1 << 30  # tokens of a chunk that costs nothing


class LinearCost:
    """Predicted seconds of one stage, linear in the `Features` of a micro-batch."""

    def __init__(self, weights: Sequence[float]) -> None:
        self.weights = weights
        self.constant, self.per_token, self.per_prefix, self.per_square, self.per_context, self.per_row = weights

    def of(self, row: Features) -> float:
        """Return the seconds of a micro-batch with these features."""
        return weigh(self.weights, row)

    def of_decodes(self, count: int, context: int) -> float:
        """Return the seconds of a micro-batch of `count` decodes alone, with `context` KV tokens in total."""
        return self.constant + (self.per_token + self.per_row) * count + self.per_context * context

    def of_chunk(self, length: int, prefix: int) -> float:
        """Return the seconds that a chunk of `length` tokens on a KV `prefix` adds."""
        return (self.per_token + self.per_prefix * prefix + self.per_square * length) * length

    def of_tokens(self, start: int, stop: int) -> float:
        """Return the seconds that the tokens `start` .. `stop - 1` of a prompt add, in chunks of any length.

        Exact if attention costs the same within a chunk as on the prefix: the number of query-key pairs is the same.
        """
        return (self.per_token + 0.5 * self.per_prefix * (start + stop)) * (stop - start)

    def longest_chunk(self, seconds: float, prefix: int) -> int:
        """Return the length of the longest chunk on a KV `prefix` that adds at most `seconds`; 0 if none does.

        It is the root n of per_square * n^2 + linear * n = seconds, in a form that is stable for a small `per_square`.
        """
        if seconds <= 0.0:
            return 0
        linear = self.per_token + self.per_prefix * prefix
        denominator = linear + math.sqrt(linear * linear + 4 * self.per_square * seconds)
        return int(2 * seconds / denominator + 1e-9) if denominator > 0.0 else UNBOUNDED
