"""The target time: the predicted time to which micro-batches are filled."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from .linear_cost import TOKENS_FOR_TIME, LinearCost
from .long_prompt import chunk_count
from .rival_fits import RivalFits
from .typical_micro_batch import TypicalMicroBatch


class TargetTime:
    """Computes the target time of a micro-batch in the slowest stage.

    It is `fixed_s` once stage times are fitted, else the time of a typical micro-batch of `chunk` tokens. Until the
    first fit, token counts stand in for time.

    `cost` is the slowest stage's cost.
    """

    def __init__(self, fixed_s: float | None, fits: RivalFits) -> None:
        self.fixed_s = fixed_s
        self.fits = fits
        self.cost = LinearCost(TOKENS_FOR_TIME)
        self.stages: list[LinearCost] = []  # of all stages, empty before the first fit
        self.typical = TypicalMicroBatch()
        self._weights: object = None  # of the fit that `cost` was made from

    def refresh(self, chunk: int) -> None:
        """Adopt a new fit: find the slowest stage for a typical micro-batch."""
        self.fits.choose()
        if self.fits.by_stage is not self._weights:
            self._weights = self.fits.by_stage
            typical = self.typical.with_chunk(self.whole_chunk(chunk))
            self.stages = [LinearCost(weights) for weights in self.fits.by_stage or ()]
            self.cost = max(self.stages, key=lambda cost: cost.of(typical))

    def seconds(self, chunk: int) -> float:
        """Return the target time if a typical micro-batch has `chunk` tokens."""
        if self.fixed_s is not None and self.fits.is_fitted:
            return self.fixed_s
        return self.cost.of(self.typical.with_chunk(self.whole_chunk(chunk)))

    def alone(self, tokens: int, overhead: float, num_stages: int) -> float:
        """Return the target time that minimizes the TTFT of a lone prompt of `tokens` tokens.

        Each chunk has a fixed cost of `overhead` seconds in a stage.
        """
        if self.fixed_s is not None:
            return self.fixed_s
        seconds = self.cost.of_tokens(0, tokens)
        return self.cost.constant + seconds / chunk_count(seconds, overhead, num_stages)

    def whole_chunk(self, chunk: int) -> float:
        """Return the prompt tokens that fill a micro-batch with typical decodes and a typical prefix."""
        typical = self.typical
        if self.fixed_s is not None and self.fits.is_fitted:
            left = self.fixed_s - self.cost.of_decodes(round(typical.decodes), round(typical.context))
            return self.cost.longest_chunk(left, round(typical.prefix))
        return max(0.0, chunk - typical.decodes)
