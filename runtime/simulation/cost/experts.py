"""Predicts the time of an MoE layer's experts: how the router spreads tokens over them, and the grouped GEMMs."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from ....conf.experts import ExpertsConfig
from .gemm import Floats, Gemm, Products

_ROWS_AT_ONCE = 16  # row counts predicted by one numpy call
_LOGISTIC_SLOPE = 1.702  # slope at which a logistic function is within 0.01 of the normal CDF
_REACH = 5.0  # maximum deviation of an expert's rows from the mean, in standard deviations
_BISECTIONS = 200


class Routing:
    """Expected rows of a rank's experts, for a top-k router over E experts.

    Each token picks k experts without replacement, independently of other tokens, with probabilities proportional to
    1 / i**skew (Zipf's law; i is an expert's popularity rank). With `skew` 0 all experts are equally likely.

    With expert parallelism, experts are assigned to ranks round-robin in order of popularity, so that the first rank
    gets the most popular expert of each round. The busiest rank exceeds the mean for two reasons: the first rank's
    higher expected load, and the expected maximum of `ranks` normal variables. The two are added in quadrature.

    Attributes:
        pairs: expected token-expert pairs of one token on the first rank.
    """

    def __init__(self, experts: ExpertsConfig, skew: float = 0.0, ranks: int = 1) -> None:
        picked = inclusion(experts.num_experts, experts.experts_per_token, skew)
        own = picked[::ranks]  # probability that a token picks each of the rank's experts
        self.pairs = float(own.sum())
        self._probabilities, self._counts = np.unique(own, return_counts=True)
        self._mean_pairs = experts.experts_per_token / ranks
        self._most_pairs = min(experts.experts_per_token, len(own))
        # Blom's approximation (1958) of the expected maximum of `ranks` standard normal variables.
        highest = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0
        # The variance of a token's pairs, as if experts were picked independently of each other.
        self._chance = highest**2 * float((own * (1 - own)).sum())

    def rows(self, tokens: Floats) -> Floats:
        """Return the expected token-expert pairs on the busiest rank, by number of tokens."""
        above = ((tokens * (self.pairs - self._mean_pairs)) ** 2 + tokens * self._chance) ** 0.5
        return np.minimum(tokens * self._mean_pairs + above, tokens * self._most_pairs)

    def active(self, tokens: Floats) -> Floats:
        """Return the expected number of the busiest rank's experts that get any row."""
        found: Floats = (self._any(self._busy(tokens)) * self._counts).sum(axis=-1)
        return np.maximum(found, np.minimum(tokens, 1.0))

    def row_tiles(self, tokens: Floats, tile_rows: Floats) -> Floats:
        """Return the expected number of tiles that cover the rows of all experts, [..., tiles], by the tile's rows.

        An expert's number of rows is assumed normal; its last tile counts as whole.
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
        """Return the number of tokens whose average load on the first rank equals the busiest rank's load."""
        return self.rows(tokens) / self.pairs

    def _any(self, tokens: Floats) -> Floats:
        """Return the probability that an expert gets any row, [..., distinct experts]."""
        found: Floats = 1 - (1 - self._probabilities) ** tokens[..., None]
        return found


def inclusion(num_experts: int, picked: int, skew: float) -> Floats:
    """Return the probability that a token picks each expert, [E], descending; they sum to `picked`.

    Sampling without replacement is equivalent to a race of exponential clocks with the experts' weights as rates, in
    which the first `picked` win. The last winner's time is close to a constant t, so that an expert wins with
    probability 1 - exp(-t weight).
    """
    if picked == num_experts:
        return np.ones(num_experts)
    if skew == 0:
        return np.full(num_experts, picked / num_experts)
    weights = np.arange(1, num_experts + 1, dtype=np.float64) ** -skew
    low, high = -60.0, 60.0 + skew * float(np.log(num_experts))  # bounds of log(t)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if -np.expm1(-np.exp(middle) * weights).sum() < picked:
            low = middle
        else:
            high = middle
    found: Floats = -np.expm1(-np.exp(low) * weights)
    return found


class ExpertProducts:
    """Predicts an MoE layer's two grouped GEMMs, each with the GEMM of the shared expert.

    Times are cached by tokens.

    Args:
        up, down: (inputs, outputs) of an expert's two weights on the rank.
        shared: the GEMMs of the shared expert; None: there is none.
    """

    def __init__(
        self, gemm: Gemm, routing: Routing, up: tuple[int, int], down: tuple[int, int], shared: Products | None = None
    ) -> None:
        self._gemm, self._routing, self._weights, self._shared = gemm, routing, (up, down), shared
        self._by_tokens: dict[int, list[float]] = {}

    def seconds(self, tokens: int) -> list[float]:
        """Return the seconds of each of the two GEMMs for `tokens` tokens."""
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
