"""Noise of a run's times relative to the learned ones, resampled for a replay by a seed."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from ...core.micro_batch_columns import Floats, Ints
from .learned_host import LearnedHost
from .observations import Observations

_BLOCKS = 16  # into which a run's time is divided
_ALIKE = 1.3  # largest size ratio of similar micro-batches
_SIZES = 12  # size classes of a run's micro-batches
_LEAST_ALIKE = 8  # micro-batches per size class
_SAME = 1e-9  # relative difference of predicted seconds below which two micro-batches count as the same
_OFFSETS = sorted(range(-64, 65), key=abs)  # search order for a similar micro-batch, nearest in time first


class Longer(NamedTuple):
    """Slowdown factors around one micro-batch, relative to typical times."""

    stages: list[float]
    turnaround: list[float]  # before each stage
    sends: list[float]  # after each stage but the last
    dispatch: float
    result: float


class BlockBootstrap:
    """Ratios of a run's times to the learned ones, by micro-batch, in blocks of its time.

    A machine is slow for a while, on all stages at once. So a draw takes whole blocks with replacement, one for each
    stretch of the replay's clock. Within a block, a micro-batch takes the ratios of one of similar size that started at
    about the same time. So stages that were slow together are slow together in a draw.

    Args:
        predicted: learned seconds of each stage, [n, S].
    """

    def __init__(self, seen: Observations, predicted: Floats, host: LearnedHost) -> None:
        times, begins = host.times, seen.begins
        first, last = float(begins.min()), float(begins.max())
        self.stretch = max(1e-6, (last - first) / _BLOCKS)
        ratios, sizes = seen.seconds / predicted, predicted.sum(axis=1)
        ratios[seen.stalls(predicted)] = 1.0  # stalls are not noise
        longer = list(
            map(
                Longer,
                ratios.tolist(),
                _ratios(host.turnaround, times.turnaround).tolist(),
                _ratios(host.sends, 1.0).tolist(),
                _ratios(host.dispatch, times.dispatch).tolist(),
                _ratios(host.result, times.result).tolist(),
            )
        )
        of_size = _SizeRatios(sizes, ratios)
        usual = np.array([of_size(size) for size in sizes.tolist()])
        numbers = np.minimum((begins - first) / self.stretch, _BLOCKS - 1).astype(np.int64)

        def block(rows: Ints, start: float) -> _Block:
            weather = np.average(ratios[rows] / usual[rows], axis=0, weights=sizes[rows]).tolist()
            since = (begins[rows] - start).tolist()
            return _Block(since, sizes[rows].tolist(), [longer[row] for row in rows], weather, of_size)

        self.whole = block(np.arange(len(begins)), 0.0)
        self.blocks = [
            block(rows, first + number * self.stretch)
            for number in range(_BLOCKS)
            if len(rows := np.flatnonzero(numbers == number))
        ]


class _SizeRatios:
    """The mean ratios, by stage, of micro-batches of similar predicted seconds, in the whole run."""

    def __init__(self, sizes: Floats, ratios: Floats) -> None:
        order = np.argsort(sizes, kind="stable")
        window = max(_LEAST_ALIKE, len(order) // _SIZES)
        sums = np.vstack([np.zeros(ratios.shape[1]), np.cumsum(ratios[order], axis=0)])
        places = np.arange(len(order))
        low, high = np.maximum(0, places - window // 2), np.minimum(len(order), places + window // 2 + 1)
        self._sizes = sizes[order].tolist()
        self._means = ((sums[high] - sums[low]) / (high - low)[:, None]).tolist()

    def __call__(self, size: float) -> list[float]:
        means: list[float] = self._means[min(bisect_left(self._sizes, size), len(self._sizes) - 1)]
        return means


class _Block:
    """Micro-batches that started in one stretch of a run.

    Args:
        begins: seconds since the start of the stretch, ascending.
        sizes: predicted seconds, summed over the stages.
        weather: by stage, the block's slowdown relative to the usual ratios of its sizes.
    """

    def __init__(
        self, begins: list[float], sizes: list[float], longer: list[Longer], weather: list[float], usual: _SizeRatios
    ) -> None:
        self._begins = begins
        self._sizes = sizes
        self._longer = longer
        self._weather = weather
        self._usual = usual
        self._turnaround, self._sends, self._dispatch, self._result = (
            np.mean([getattr(each, name) for each in longer], axis=0).tolist() for name in Longer._fields[1:]
        )

    def at(self, begin: float, size: float, *, other: int | None = None) -> Longer:
        """Return the slowdown of the micro-batch nearest in time that has a similar size.

        If the block has none, return the run's usual slowdown at that size, scaled by the block's `weather`. With
        `other`, skip micro-batches of exactly that size, which may be the replayed one itself, and then the `other`
        nearest ones.
        """
        sizes, low, high, left = self._sizes, size / _ALIKE, size * _ALIKE, other or 0
        place = bisect_left(self._begins, begin)
        for offset in _OFFSETS:
            index = place + offset
            if not 0 <= index < len(sizes) or not low <= sizes[index] <= high:
                continue
            if other is None:
                return self._longer[index]
            if abs(sizes[index] / size - 1) > _SAME:
                if left == 0:
                    return self._longer[index]
                left -= 1
        stages = [usual * weather for usual, weather in zip(self._usual(size), self._weather, strict=True)]
        return Longer(stages, self._turnaround, self._sends, self._dispatch, self._result)


class DrawnNoise:
    """One draw of a `BlockBootstrap`. It is the same for any setting at the same time.

    Args:
        in_order: the whole run is one block, so that the machine is slow when it was in the run. A micro-batch then
            takes the noise of another one of similar size; the seed selects which.
    """

    def __init__(self, noise: BlockBootstrap, seed: int, *, in_order: bool = False) -> None:
        self._other = seed if in_order else None
        self._blocks = [noise.whole] if in_order else noise.blocks
        self._stretch_s = math.inf if in_order else noise.stretch
        self._seed = seed
        self._stretch = -1
        self._begin = 0.0
        self._block = noise.whole

    def at(self, now: float, seconds: float) -> Longer:
        """Return the slowdown now of a micro-batch predicted to take `seconds` over all stages."""
        if (stretch := int(now / self._stretch_s)) != self._stretch:
            self._stretch, self._begin = stretch, stretch * self._stretch_s if stretch else 0.0
            self._block = random.Random(f"{self._seed} {stretch}").choice(self._blocks)
        return self._block.at(now - self._begin, seconds, other=self._other)


def _ratios(samples: Floats, mean: float) -> Floats:
    """Return samples over their mean. Samples hidden behind something longer get the median ratio."""
    if mean <= 0 or not np.isfinite(samples).any():
        return np.ones_like(samples)
    ratios = np.maximum(samples / mean, 0.0)
    return np.where(np.isfinite(ratios), ratios, np.nanmedian(ratios))
