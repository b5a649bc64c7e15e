"""From how many tokens on a stage prefills about as fast as it can, told from micro-batches of a few sizes."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...core.messages import Span
from ...core.run_record import MicroBatchRecord

FIRST = 256  # before anything is known: near saturation for most models and GPUs (paper, Figure 4 and 4.4)
_RUNGS = (1.0, 0.5, 2.0, 4.0)  # of it: what is tried; the larger ones only where the one before was clearly faster
_TRIES = 2  # of each
_WHOLE = 0.8  # of a size counts for it
_IN_VAIN = 16  # micro-batches with prompts, and none of the size: prompts are too short for it, or too few
_FLAT = 0.95  # of the speed with half the tokens: twice as many are no faster


class Saturation:
    """Sizes to try, and the prefill speed that each gave: the highest, for decodes that rode along, long prefixes and
    what else the machine did only make it lower.

    Speeds are the slowest stage's. A straight line through times by tokens would put the point too far out: to read
    the weights and to compute overlap, so that times are flat at first.
    """

    def __init__(self, tile: int, num_stages: int) -> None:
        self._num_stages = num_stages
        self._sizes = [aligned(round(FIRST * rung), tile) for rung in _RUNGS]
        self._rung = 0
        self._tries = self._attempts = 0  # of this rung: micro-batches of the size, and with prompts
        self._dispatched = self._computed = 0  # micro-batches with prompts
        self._awaited = 0  # so many computed show what the rung gave
        self._seconds: dict[int, float] = {}  # by micro-batch under way: of the slowest stage so far
        self._speeds: dict[int, float] = {}  # tokens/s by tokens: the highest

    @property
    def is_known(self) -> bool:
        """Whether nothing is left to try."""
        return self._rung == len(self._sizes)

    @property
    def is_in_vain(self) -> bool:
        """Whether a size has been offered for long without being filled."""
        return self._attempts >= _IN_VAIN

    @property
    def offer(self) -> int | None:
        """What the next micro-batch with prompts shall hold; None while others are under way, or if all is known."""
        return None if self.is_known or self._tries >= _TRIES else self._sizes[self._rung]

    def dispatched(self, tokens: int) -> None:
        """A micro-batch with prompts, and of so many tokens."""
        self._dispatched += 1
        if (offer := self.offer) is None:
            return
        self._attempts += 1
        if tokens >= _WHOLE * offer:
            self._tries += 1
            self._awaited = self._dispatched

    def observe(self, micro_batch: MicroBatchRecord, spans: Sequence[Span]) -> None:
        """Stages, one or several, have computed a micro-batch."""
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
        """On to the next rung, if it promises anything."""
        self._rung += 1
        self._tries = self._attempts = 0
        if self._rung > 1:
            largest = max(self._sizes[: self._rung])
            if self.speed_at(largest / 2) >= _FLAT * self.speed_at(largest):
                self._rung = len(self._sizes)

    def speed_at(self, tokens: float) -> float:
        """Tokens/s of micro-batches of so many tokens, 0 where nothing has been seen."""
        sizes, speeds = self._curve
        return float(np.interp(tokens, sizes, speeds))

    def tokens_at(self, share: float) -> int:
        """Tokens from which on a micro-batch has that share of the highest prefill speed; not below 256 where prompts
        were too short to tell."""
        sizes, speeds = self._curve
        if len(sizes) == 1:
            return FIRST
        found = round(float(np.interp(share * speeds[-1], speeds, sizes)))
        return found if self.is_known else max(found, FIRST)

    @property
    def _curve(self) -> tuple[list[int], list[float]]:
        """Sizes, ascending, each faster than all smaller ones, and their speeds."""
        sizes, speeds = [0], [0.0]
        for tokens, speed in sorted(self._speeds.items()):
            if speed > speeds[-1]:
                sizes.append(tokens)
                speeds.append(speed)
        return sizes, speeds


def aligned(tokens: int, tile: int) -> int:
    """The next multiple of the tile."""
    return max(1, -(-tokens // tile)) * tile
