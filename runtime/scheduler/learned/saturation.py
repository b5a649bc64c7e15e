"""The number of tokens that saturates a stage's prefill speed, learned from a few sizes."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...core.messages import Span
from ...core.run_record import MicroBatchRecord

FIRST_SIZE = 256  # tokens, before anything is known: near saturation for most models and GPUs (paper, Figure 4 and 4.4)
_SIZE_FACTORS = (1.0, 0.5, 2.0, 4.0)  # times the first size; larger ones only if the previous was clearly faster
_TRIES = 2  # micro-batches of each size
_FILLED_SHARE = 0.8  # a micro-batch of this share of a size counts as one of the size
_VAIN_ATTEMPTS = 16  # micro-batches with prompts that did not fill the size: prompts are too short or too few
_FLAT_SPEED = 0.95  # if half of a size has this share of the size's speed, more tokens are no faster


class Saturation:
    """Offers micro-batch sizes to try, and keeps the highest prefill speed that each size reached.

    The highest counts because piggybacked decodes, long prefixes and other load on the machine only lower it. Speeds
    are of the slowest stage. A linear fit of time over tokens would overestimate the saturation point: reading the
    weights overlaps with compute, so times are flat at first.
    """

    def __init__(self, tile: int, num_stages: int) -> None:
        self._num_stages = num_stages
        self._sizes = [aligned(round(FIRST_SIZE * factor), tile) for factor in _SIZE_FACTORS]
        self._place = 0  # index of the size being tried
        self._tries = self._attempts = 0  # for this size: micro-batches that filled it, and micro-batches with prompts
        self._dispatched = self._computed = 0  # micro-batches with prompts
        self._awaited = 0  # micro-batches that must be computed before the speed of the size is known
        self._seconds: dict[int, float] = {}  # of the slowest stage so far, by micro-batch in flight
        self._speeds: dict[int, float] = {}  # the highest tokens/s, by tokens

    @property
    def is_known(self) -> bool:
        """Whether no size is left to try."""
        return self._place == len(self._sizes)

    @property
    def is_in_vain(self) -> bool:
        """Whether a size has been offered for long without being filled."""
        return self._attempts >= _VAIN_ATTEMPTS

    @property
    def offer(self) -> int | None:
        """Tokens for the next micro-batch with prompts; None once all sizes have been tried.

        A size is offered until its speed is known, to keep micro-batches in flight alike: short ones wait behind long.
        """
        return None if self.is_known else self._sizes[self._place]

    def dispatched(self, tokens: int) -> None:
        """Record that a micro-batch with prompts, of `tokens` tokens, has been dispatched."""
        self._dispatched += 1
        if (offer := self.offer) is None:
            return
        if self._tries >= _TRIES:
            return
        self._attempts += 1
        if tokens >= _FILLED_SHARE * offer:
            self._tries += 1
            self._awaited = self._dispatched

    def observe(self, micro_batch: MicroBatchRecord, spans: Sequence[Span]) -> None:
        """Learn from the spans of one or several stages that have computed a micro-batch."""
        if self.is_known or not micro_batch.chunks:
            return
        slowest = self._seconds.pop(micro_batch.micro_batch, 0.0)
        for span in spans:
            slowest = max(slowest, span.end - span.begin)
        if spans[-1].stage < self._num_stages - 1:
            self._seconds[micro_batch.micro_batch] = slowest
            return
        self._computed += 1
        tokens = micro_batch.num_tokens
        if 2 * micro_batch.prefill_tokens >= tokens and slowest > 0.0:
            self._speeds[tokens] = max(self._speeds.get(tokens, 0.0), tokens / slowest)
        if self._tries >= _TRIES and self._computed >= self._awaited:
            self._climb()

    def _climb(self) -> None:
        """Move on to the next size, or stop the trials if it promises no gain."""
        self._place += 1
        self._tries = self._attempts = 0
        if self._place > 1:
            largest = max(self._sizes[: self._place])
            if self.speed_at(largest / 2) >= _FLAT_SPEED * self.speed_at(largest):
                self._place = len(self._sizes)

    def speed_at(self, tokens: float) -> float:
        """Return the tokens/s of micro-batches of `tokens` tokens; 0 if none has been observed."""
        sizes, speeds = self._curve
        return float(np.interp(tokens, sizes, speeds))

    def tokens_at(self, share: float) -> int:
        """Return the smallest number of tokens with `share` of the highest prefill speed.

        It is at least `FIRST_SIZE` if prompts were too short to tell.
        """
        sizes, speeds = self._curve
        if len(sizes) == 1:
            return FIRST_SIZE
        found = round(float(np.interp(share * speeds[-1], speeds, sizes)))
        return found if self.is_known else max(found, FIRST_SIZE)

    @property
    def overhead(self) -> float:
        """Fixed cost of a micro-batch, in seconds, extrapolated from sizes that saturate a stage.

        It is the intercept at 0 tokens of the line through the times at the largest size and at a quarter of that
        size. 0 if fewer than two sizes are known.
        """
        sizes, speeds = self._curve
        if len(sizes) < 3:
            return 0.0
        large, small = sizes[-1], max(sizes[1], sizes[-1] // 4)
        if small == large:
            return 0.0
        most, least = large / speeds[-1], small / float(np.interp(small, sizes, speeds))
        return max(0.0, (least * large - most * small) / (large - small))

    @property
    def _curve(self) -> tuple[list[int], list[float]]:
        """Sizes in ascending order, each faster than all smaller ones, and their speeds."""
        sizes, speeds = [0], [0.0]
        for tokens, speed in sorted(self._speeds.items()):
            if speed > speeds[-1]:
                sizes.append(tokens)
                speeds.append(speed)
        return sizes, speeds


def aligned(tokens: int, tile: int) -> int:
    """Return `tokens` rounded up to a multiple of the tile."""
    return max(1, -(-tokens // tile)) * tile
