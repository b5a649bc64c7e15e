"""How a run's times differed from what was learned of it, drawn anew for a replay by a seed."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..core.micro_batch_columns import Floats, Ints
from .learned_host import LearnedHost
from .observations import Observations

_BLOCKS = 16  # of a run's time
_ALIKE = 1.3  # most ratio of the sizes of micro-batches that are alike
_SIZES = 12  # classes of size of a run's micro-batches
_LEAST_ALIKE = 8  # micro-batches of such a class
_SAME = 1e-9  # relative difference of the predicted seconds of one and the same micro-batch
_OFFSETS = sorted(range(-64, 65), key=abs)  # places, nearest in time first, where one that is alike is looked for


class Longer(NamedTuple):
    """How many times longer than typical things took around one micro-batch."""

    stages: list[float]
    turnaround: list[float]  # before each stage
    sends: list[float]  # after each stage but the last
    dispatch: float
    result: float


class BlockBootstrap:
    """What the times of a run were over the learned ones, by micro-batch, in blocks of its time.

    A machine is slow for a while, and all its stages with it. So a draw takes whole blocks with repetition, one for
    each stretch of the replay's clock. Within a block, each micro-batch takes after one of about its size that began
    about then. So stages that computed at the same time stay slow at the same time.

    Args:
        predicted: seconds of each stage as learned, [n, S].
    """

    def __init__(self, seen: Observations, predicted: Floats, host: LearnedHost) -> None:
        times, begins = host.times, seen.begins
        first, last = float(begins.min()), float(begins.max())
        self.stretch = max(1e-6, (last - first) / _BLOCKS)
        self.num_stages = predicted.shape[1]
        ratios, sizes = seen.seconds / predicted, predicted.sum(axis=1)
        ratios[seen.stalls(predicted)] = 1.0  # which are no noise
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
    """The mean ratios, by stage, of micro-batches of about the same predicted seconds, in the whole run."""

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
    """Micro-batches that began in one stretch of a run.

    Args:
        begins: seconds since the begin of the stretch, ascending.
        sizes: predicted seconds of all stages.
        weather: by stage, how many times longer they took than is usual of their sizes.
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
        """Return that of the micro-batch nearest in time whose size is about the same.

        Where the block has none, it is what is usual of that size in the whole run, in the weather of the block. With
        `other`, a micro-batch of just that size does not count, since it would be the very one that is replayed, nor do
        so many of the nearest.
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
        stages: of the setting, each the run's stage that it takes after.
        in_order: the whole run is one block, so that the machine is slow when it was. A micro-batch then takes
            after another one of about its time, the seed says which.
    """

    def __init__(self, noise: BlockBootstrap, seed: int, stages: Sequence[int], *, in_order: bool = False) -> None:
        self._other = seed if in_order else None
        self._blocks = [noise.whole] if in_order else noise.blocks
        self._stretch_s = math.inf if in_order else noise.stretch
        self._seed = seed
        self._stages = list(stages)
        self._is_same = self._stages == list(range(noise.num_stages))
        self._stretch = -1
        self._begin = 0.0
        self._block = noise.whole

    def at(self, now: float, seconds: float) -> Longer:
        """Return how much longer a micro-batch that is to take `seconds` in all takes now."""
        if (stretch := int(now / self._stretch_s)) != self._stretch:
            self._stretch, self._begin = stretch, stretch * self._stretch_s if stretch else 0.0
            self._block = random.Random(f"{self._seed} {stretch}").choice(self._blocks)
        found = self._block.at(now - self._begin, seconds, other=self._other)
        return found if self._is_same else self._mapped(found)

    def _mapped(self, found: Longer) -> Longer:
        """Return the same for the setting's stages."""
        stages, sends = self._stages, found.sends or [1.0]
        return Longer(
            [found.stages[stage] for stage in stages],
            [found.turnaround[stage] for stage in stages],
            [sends[min(stage, len(sends) - 1)] for stage in stages[:-1]],
            found.dispatch,
            found.result,
        )


def _ratios(samples: Floats, mean: float) -> Floats:
    """Return samples over their mean. Those that are hidden behind something longer are taken to be typical."""
    if mean <= 0 or not np.isfinite(samples).any():
        return np.ones_like(samples)
    ratios = np.maximum(samples / mean, 0.0)
    return np.where(np.isfinite(ratios), ratios, np.nanmedian(ratios))
