"""How a run's times differed from what was learned of it, drawn anew for a replay by a seed."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from ..core.micro_batch_columns import Floats
from .learned_host import LearnedHost

_BLOCKS = 16  # of a run's time
_ALIKE = 1.3  # most ratio of the sizes of micro-batches that are alike
_FARTHEST = 64  # micro-batches, either way in time, among which one that is alike is looked for


class Noise:
    """The residuals of a run's stage times, in blocks of its time, and its host times.

    A machine is slow for a while, and all its stages with it. So a draw takes whole blocks with repetition, one for
    each stretch of the replay's clock. Within a block, each micro-batch gets the residuals of one of about its size
    that began about then. So stages that computed at the same time stay slow at the same time.
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
        self.blocks: list[_Block] = []
        for number in range(_BLOCKS):
            if len(rows := np.flatnonzero(numbers == number)):
                since = (begins[rows] - first - number * self.stretch).tolist()
                self.blocks.append(_Block(since, sizes[rows].tolist(), ratios[rows].tolist()))
        means = host.times
        self.dispatch = _ratios(host.dispatch, means.dispatch)
        self.result = _ratios(host.result, means.result)
        self.turnaround = _ratios(host.turnaround, means.turnaround)
        self.link = host.link_ratios.tolist() or [1.0]


class _Block:
    """Micro-batches that began in one stretch of a run.

    Args:
        begins: seconds since the begin of the stretch, ascending.
        sizes: predicted seconds of all stages.
        ratios: of real to predicted seconds, by stage.
    """

    def __init__(self, begins: list[float], sizes: list[float], ratios: list[list[float]]) -> None:
        self._begins = begins
        self._sizes = sizes
        self._ratios = ratios

    def ratios(self, begin: float, size: float) -> list[float]:
        """Return the ratios of the micro-batch nearest in time whose size is about the same, or else nearest in
        size."""
        sizes, low, high = self._sizes, size / _ALIKE, size * _ALIKE
        place = bisect_left(self._begins, begin)
        nearest, least = place, float("inf")
        for distance in range(_FARTHEST):
            for index in (place - distance, place + distance):
                if 0 <= index < len(sizes):
                    if low <= sizes[index] <= high:
                        return self._ratios[index]
                    off = abs(sizes[index] - size)
                    if off < least:
                        nearest, least = index, off
        return self._ratios[min(nearest, len(sizes) - 1)]


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
            blocks = self._noise.blocks
            place = stretch % len(blocks)
            if not self._in_order:
                place = random.Random(f"{self._seed} {stretch}").randrange(len(blocks))
            self._block = blocks[place]
        row = self._block.ratios(now - stretch * self._noise.stretch, seconds)
        return [row[stage] for stage in self._stages]


def _ratios(samples: Floats, mean: float) -> list[float]:
    """Return samples over their mean; 1 where there is none."""
    return np.maximum(samples / mean, 0.0).tolist() if len(samples) and mean > 0 else [1.0]
