"""The predicted time that micro-batches are filled to."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from ...core.features import Features
from .long_prompt import chunk_count
from .rival_fits import RivalFits
from .stage_cost import TOKENS_FOR_TIME, StageCost
from .typical_micro_batch import TypicalMicroBatch

_FORESEEN_PREFIX = 4  # times the longest prefix so far: of longer ones a fit tells little
SMALLEST_CHUNK = 1 / 16  # of a whole one: a smaller chunk is not worth its overhead
_ADMISSION_HEADROOM = 1.1  # times the rate at which prompts come in; each free slot adds as much again


class TargetTime:
    """Says how many seconds of the slowest stage a micro-batch should take.

    They are `fixed_s` once stage times are fitted. Without it they are the time of a typical micro-batch of `chunk`
    tokens. Until the first fit, tokens stand for time.

    `cost` is the slowest stage's.
    """

    def __init__(self, fixed_s: float | None, chunk: int, fits: RivalFits) -> None:
        self.fixed_s = fixed_s
        self.fits = fits
        self.cost = StageCost(TOKENS_FOR_TIME)
        self.stages: list[StageCost] = []  # of all stages, empty before the first fit
        self.typical = TypicalMicroBatch(chunk)
        self._weights: object = None  # of the fit that `cost` was made from

    def refresh(self, chunk: int, free_slots: int | None) -> None:
        """Take over a new fit: find the stage that is slowest for a typical micro-batch."""
        self.fits.choose()
        if self.fits.by_stage is not self._weights:
            self._weights = self.fits.by_stage
            typical = self._features(chunk, free_slots)
            self.stages = [StageCost(weights) for weights in self.fits.by_stage or ()]
            self.cost = max(self.stages, key=lambda cost: cost.of(typical))

    def seconds(self, chunk: int, free_slots: int | None) -> float:
        """Return the time to fill to.

        Args:
            chunk: tokens of a typical micro-batch.
            free_slots: slots that waiting prompts could take, None if no prompt waits.
        """
        if self.fixed_s is not None and self.fits.is_fitted:
            return self.fixed_s
        return self.cost.of(self._features(chunk, free_slots))

    def of_long_prompt(self, tokens: int, chunk: int) -> float:
        """Return the time that gives a prompt of `tokens` tokens as many equal micro-batches as whole chunks would.

        It is that of a chunk in the middle of the prompt, with typical decodes. Before prefixes are nearly as long as
        there, the fit does not know what they cost, and it is that of a chunk as far on as the fit can tell.
        """
        if self.fixed_s is not None:
            return self.fixed_s
        typical = self.typical
        middle = min(0.5 * tokens, _FORESEEN_PREFIX * typical.longest_prefix)
        row = typical.with_chunk(max(chunk - typical.decodes, chunk * SMALLEST_CHUNK))
        return self.cost.of(row._replace(chunk_prefix=middle * (row.tokens - typical.decodes)))

    def alone(self, tokens: int, overhead: float, num_stages: int) -> float:
        """Return the time with which a prompt of `tokens` tokens that is alone has its first token the soonest.

        Each chunk costs a stage `overhead` seconds beside its tokens.
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

    def _features(self, chunk: int, free_slots: int | None) -> Features:
        """Return the features of a micro-batch with a typical chunk, decodes and prefix.

        Waiting prompts enter at the rate at which decodes end, whatever the chunk. Where that is less than `chunk` a
        micro-batch, spreading it makes equal micro-batches where whole chunks now and then would not.
        """
        tokens = self.whole_chunk(chunk)
        if free_slots is not None:
            pace = _ADMISSION_HEADROOM * (1 + free_slots) * self.typical.prefill_tokens
            tokens = min(tokens, max(pace, chunk * SMALLEST_CHUNK))
        return self.typical.with_chunk(tokens)
