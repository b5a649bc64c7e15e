"""How a run's times differed from what was learned of it, drawn anew for a replay by a seed."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from ..core.micro_batch_columns import Floats
from .learned_host import LearnedHost

_BLOCKS = 16  # of a run's time
_NEIGHBOURS = 2  # micro-batches either way, in the order of their size, of which one is drawn


class Noise:
    """The residuals of a run's stage times, in blocks of its time, and its host times.

    A machine is slow for a while, and all its stages with it. So a draw takes whole blocks with repetition, one for
    each stretch of the replay's clock. Within a block, each micro-batch gets the residuals that one of about its size
    had.

    Args:
        begins: when each micro-batch began, in seconds, ascending, [n].
        seconds: that it took on each stage, [n, S].
        predicted: the same as learned.
    """

    def __init__(self, begins: Floats, seconds: Floats, predicted: Floats, host: LearnedHost) -> None:
        ratios, sizes = seconds / predicted, predicted.sum(axis=1)
        first, last = float(begins[0]), float(begins[-1])
        self.num_stages = seconds.shape[1]
        self.stretch = max(1e-6, (last - first) / _BLOCKS)
        numbers = np.minimum((begins - first) / self.stretch, _BLOCKS - 1).astype(np.int64)
        self.blocks: list[tuple[list[float], list[list[float]]]] = []
        for number in np.unique(numbers):
            rows = np.flatnonzero(numbers == number)
            rows = rows[np.argsort(sizes[rows], kind="stable")]
            self.blocks.append((sizes[rows].tolist(), ratios[rows].tolist()))
        means = host.times
        self.dispatch = _ratios(host.dispatch, means.dispatch)
        self.result = _ratios(host.result, means.result)
        self.turnaround = _ratios(host.turnaround, means.turnaround)
        self.link = host.link_ratios.tolist() or [1.0]


class DrawnNoise:
    """One draw of a `Noise`: how many times longer things take. It is the same for any setting at the same time.

    Args:
        stages: of the setting, each the run's stage whose residuals it gets.
        in_order: blocks come in the run's own order, so that the machine is slow when it was.
    """

    def __init__(self, noise: Noise, seed: int, stages: Sequence[int], *, in_order: bool = False) -> None:
        self._noise = noise
        self._seed = seed
        self._stages = list(stages)
        self._host = random.Random(f"{seed} host")
        self._in_order = in_order
        self._stretch = -1
        self._block = noise.blocks[0]
        self._random = self._host

    def dispatch(self) -> float:
        return self._host.choice(self._noise.dispatch)

    def result(self) -> float:
        return self._host.choice(self._noise.result)

    def turnaround(self) -> float:
        return self._host.choice(self._noise.turnaround)

    def link(self) -> float:
        return self._host.choice(self._noise.link)

    def stages(self, now: float, seconds: float) -> list[float]:
        """Return the factor of each stage for a micro-batch that is to take `seconds` in all."""
        if (stretch := int(now / self._noise.stretch)) != self._stretch:
            self._stretch = stretch
            self._random = random.Random(f"{self._seed} {stretch}")
            blocks = self._noise.blocks
            self._block = blocks[stretch % len(blocks)] if self._in_order else self._random.choice(blocks)
        sizes, ratios = self._block
        place = bisect_left(sizes, seconds) + self._random.randint(-_NEIGHBOURS, _NEIGHBOURS)
        row = ratios[min(max(0, place), len(ratios) - 1)]
        return [row[stage] for stage in self._stages]


def _ratios(samples: Floats, mean: float) -> list[float]:
    """Return samples over their mean; 1 where there is none."""
    return np.maximum(samples / mean, 0.0).tolist() if len(samples) and mean > 0 else [1.0]
