"""Predicts the time of a layer's experts: how a router spreads tokens over them, and the products that follow."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from ...conf.experts import ExpertsConfig
from .gemm import Floats, Gemm, Products

_ROWS_AT_ONCE = 16  # numbers of rows that one call of numpy predicts
_LOGISTIC_SLOPE = 1.702  # with it a logistic function is within 0.01 of the normal distribution
_REACH = 5.0  # standard deviations from the mean beyond which an expert's number of rows does not lie
_BISECTIONS = 200


class Routing:
    """Expects how many rows the experts of a rank get, where a router picks k of E experts for each token.

    A token picks experts without replacement with probabilities in proportion to 1 / i**skew (Zipf's law; i is an
    expert's place in the order of popularity), whatever other tokens pick. With `skew` 0 all are alike.

    Where experts are dealt to several ranks, they are dealt by turns in the order of popularity, so that the first rank
    gets the most popular of each turn. The busiest rank of a micro-batch lies above the mean of the ranks for two
    reasons: the first rank does on average, and by chance the maximum of `ranks` normal variables does. The two are
    joined as the sides of a right angle.

    Attributes:
        pairs: expected pairs of a token and an expert, of one token on the first rank.
    """

    def __init__(self, experts: ExpertsConfig, skew: float = 0.0, ranks: int = 1) -> None:
        picked = inclusion(experts.num_experts, experts.experts_per_token, skew)
        own = picked[::ranks]  # the probability that a token picks it, of each expert of the rank
        self.pairs = float(own.sum())
        self._probabilities, self._counts = np.unique(own, return_counts=True)
        self._mean_pairs = experts.experts_per_token / ranks
        self._most_pairs = min(experts.experts_per_token, len(own))
        # Blom's approximation of the expected maximum of that many standard normal variables (1958).
        highest = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0
        # The variance of a token's pairs is as if each expert were picked independently of the others.
        self._chance = highest**2 * float((own * (1 - own)).sum())

    def rows(self, tokens: Floats) -> Floats:
        """Return the expected pairs on the busiest rank, for numbers of tokens."""
        above = ((tokens * (self.pairs - self._mean_pairs)) ** 2 + tokens * self._chance) ** 0.5
        return np.minimum(tokens * self._mean_pairs + above, tokens * self._most_pairs)

    def active(self, tokens: Floats) -> Floats:
        """Return the expected number of the busiest rank's experts that get any row."""
        found: Floats = (self._any(self._busy(tokens)) * self._counts).sum(axis=-1)
        return np.maximum(found, np.minimum(tokens, 1.0))

    def row_tiles(self, tokens: Floats, tile_rows: Floats) -> Floats:
        """Return the expected number of tiles that cover the rows of each expert, [..., tiles], by the tile's rows.

        An expert's number of rows is taken as normal, its last tile as computed whole.
        """
        busy = self._busy(tokens)
        mean = (busy[..., None] * self._probabilities)[..., None]
        deviation = np.maximum((mean * (1 - self._probabilities[:, None])) ** 0.5, 1e-9)
        sure = np.floor(np.maximum(mean - _REACH * deviation, 0.0) / tile_rows)  # tiles beyond the first
        possible = np.ceil((mean + _REACH * deviation) / tile_rows)
        further = sure[..., None] + np.arange(1, 1 + int((possible - sure).max()))
        scores = (mean[..., None] - further * tile_rows[:, None] - 0.5) / deviation[..., None]
        begun = 1 / (1 + np.exp(-np.clip(_LOGISTIC_SLOPE * scores, -40.0, 40.0)))
        tiles = self._any(busy)[..., None] + sure + begun.sum(axis=-1)
        found: Floats = (tiles * self._counts[:, None]).sum(axis=-2)
        return np.maximum(found, np.minimum(tokens, 1.0)[..., None])

    def _busy(self, tokens: Floats) -> Floats:
        """Return the number of tokens that would give the rank so many rows on average as it gets when busiest."""
        return self.rows(tokens) / self.pairs

    def _any(self, tokens: Floats) -> Floats:
        """Return the probability that an expert gets any row, [..., distinct experts]."""
        found: Floats = 1 - (1 - self._probabilities) ** tokens[..., None]
        return found


def inclusion(num_experts: int, picked: int, skew: float) -> Floats:
    """Return the probability that a token picks each expert, [E], falling; their sum is `picked`.

    Picking without replacement is a race of exponential clocks with the experts' weights as rates, in which the first
    `picked` win. The k-th comes close to a fixed instant t, so that an expert wins with probability 1 - exp(-t weight).
    """
    if picked == num_experts:
        return np.ones(num_experts)
    if skew == 0:
        return np.full(num_experts, picked / num_experts)
    weights = np.arange(1, num_experts + 1, dtype=np.float64) ** -skew
    low, high = -60.0, 60.0 + skew * float(np.log(num_experts))  # of the logarithm of t
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if -np.expm1(-np.exp(middle) * weights).sum() < picked:
            low = middle
        else:
            high = middle
    found: Floats = -np.expm1(-np.exp(low) * weights)
    return found


class ExpertProducts:
    """Predicts the two products of a layer of experts, each one grouped kernel, with those of the shared expert.

    Times are cached by tokens.

    Args:
        up, down: (inputs, outputs) of an expert's two weights on the rank.
        shared: the products of the shared expert; None: there is none.
    """

    def __init__(
        self, gemm: Gemm, routing: Routing, up: tuple[int, int], down: tuple[int, int], shared: Products | None = None
    ) -> None:
        self._gemm, self._routing, self._weights, self._shared = gemm, routing, (up, down), shared
        self._by_tokens: dict[int, list[float]] = {}

    def seconds(self, tokens: int) -> list[float]:
        """Return the seconds of each of the two products for so many tokens."""
        known = self._by_tokens.get(tokens)
        if known is None:
            first = tokens - tokens % _ROWS_AT_ONCE
            block = np.arange(first, first + _ROWS_AT_ONCE, dtype=np.float64)
            rows, active = self._routing.rows(block), self._routing.active(block)
            tiles = self._routing.row_tiles(block, self._gemm.tile_rows)
            times = np.array([self._gemm.grouped_seconds(rows, tiles, active, *sizes) for sizes in self._weights]).T
            for number, each in enumerate(times.tolist(), first):
                beside = (0.0, 0.0) if self._shared is None else self._shared.seconds(number)
                self._by_tokens[number] = [own + more for own, more in zip(each, beside, strict=True)]
            known = self._by_tokens[tokens]
        return known
