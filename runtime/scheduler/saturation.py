"""From how many tokens on a stage prefills about as fast as it can, told from micro-batches of a few sizes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..messages import Span
from ..spans import StepRecord

FIRST = 256  # before anything is known: near saturation for most models and GPUs (paper, Figure 4 and 4.4)
_SIZES = (1.0, 0.5, 2.0, 4.0)  # of it: that prefill is no faster yet with half, and hardly any more with four times
_TRIES = 4  # of each size
_SEEN = 450  # tokens: of micro-batches below, the fastest says little about how fast larger ones are


class Saturation:
    """Sizes to try, in turn, and the prefill speed that each gave: the highest, for decodes that rode along, long
    prefixes and what else the machine did only make it lower.

    Speeds are the slowest stage's. A straight line through times by tokens would put the point too far out: to read
    the weights and to compute overlap, so that times are flat at first.
    """

    def __init__(self, tile: int) -> None:
        self._sizes = [aligned(round(FIRST * share), tile) for share in _SIZES]
        self._turn = 0
        self._seconds: dict[int, float] = {}  # by micro-batch under way: of the slowest stage so far
        self._speeds: list[tuple[int, float]] = []  # tokens, and tokens/s

    @property
    def is_tried(self) -> bool:
        return self._turn >= _TRIES * len(self._sizes)

    @property
    def size(self) -> int:
        """What the next micro-batch with a prompt shall hold."""
        return self._sizes[0 if self.is_tried else self._turn % len(self._sizes)]

    def tried(self) -> None:
        """A micro-batch of `size` was filled, or as much of it as there was."""
        self._turn += 1

    def observe(self, step: StepRecord, spans: Sequence[Span], num_stages: int) -> None:
        """Stages, one or several, have computed a micro-batch."""
        tokens = step.num_tokens
        if 2 * step.prefill_tokens < tokens:
            return
        slowest = self._seconds.pop(step.step, 0.0)
        for span in spans:
            slowest = max(slowest, span.end - span.begin)
        if spans[-1].stage < num_stages - 1:
            self._seconds[step.step] = slowest
        elif slowest > 0.0:
            self._speeds.append((tokens, tokens / slowest))

    def speed_at(self, tokens: float) -> float:
        """Tokens/s of micro-batches of so many tokens, 0 where nothing has been seen."""
        sizes, speeds = self._curve
        return float(np.interp(tokens, sizes, speeds))

    def tokens_at(self, share: float) -> int:
        """Tokens from which on a micro-batch has that share of the highest prefill speed; not below 256 where
        prompts were too short to tell."""
        sizes, speeds = self._curve
        if len(sizes) == 1:
            return FIRST
        found = round(float(np.interp(share * speeds[-1], speeds, sizes)))
        seen = max([tokens for tokens, _ in self._speeds])
        return found if seen >= _SEEN else max(found, FIRST)

    @property
    def _curve(self) -> tuple[list[int], list[float]]:
        """Sizes, ascending, each faster than all smaller ones, and their speeds."""
        sizes, speeds = [0], [0.0]
        for tokens, speed in sorted(self._speeds):
            if speed > speeds[-1]:
                if tokens == sizes[-1]:
                    sizes.pop()
                    speeds.pop()
                sizes.append(tokens)
                speeds.append(speed)
        return sizes, speeds


def aligned(tokens: int, tile: int) -> int:
    """The next multiple of the tile."""
    return max(1, -(-tokens // tile)) * tile
