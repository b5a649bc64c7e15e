"""Replays of a run's twin under other settings, paired by seed with replays of the run as it was."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, variance
from time import perf_counter

from ..core.run_record import RunRecord
from ..core.student import t_quantile
from ..simulation.setting import Setting
from .bounded_costs import BoundedCosts
from .explanation import METRICS, TOLERANCE, Interval
from .observations import SizesShown
from .twin import Twin, Values, values_of

_OUTSIDE = 0.1  # of outcomes, on both sides of a range
_Z = 1.6449  # standard normal deviate that nine of ten lie within, on both sides
_REPLAY_ERROR = 0.5  # share of the twin's own error that a change may keep
# Standard deviations of the logarithm of what learned stage times foretell. Those of `_FIT_ERROR` are from savings that
# twins of simulated runs foretold, learned as of real ones, beside the true ones (docs/explain.md#how-good-ranges-are).
_FIT_ERROR = {"duration": 0.006, "p99_itl_ms": 0.04, "p99_ttft_ms": 0.01}
# Of one real run beside another of the same setting, started anew: more than a single run shows of itself. Pooled over
# settings that `benchmarks.advice` ran again on two shared CPU cores, by turns (docs/explain.md#how-good-ranges-are).
_RUN_ERROR = {"duration": 0.024, "p99_itl_ms": 0.05, "p99_ttft_ms": 0.03}
_CHANGE_ERROR = 0.1  # over the change's effect
_BEYOND_ERROR = 0.1  # of compute time in sizes that the run has not shown
SECONDS_A_MICRO_BATCH = 60e-6  # of a replay, with its share of reading the record; measured, compiled
_RANKS_ERROR = 0.3  # with another number of tensor-parallel ranks, whose sums no run shows


class WhatIf:
    """A run's twin, and what its replays came to so far.

    Args:
        twin: the run's.
        items: how many of its requests are replayed, the first ones; None: all.
    """

    def __init__(self, twin: Twin, *, items: int | None = None) -> None:
        self.twin = twin if items is None else replace(twin, items=twin.items[:items], is_whole=False)
        self.shown = None if twin.learned is None else twin.learned.fit.shown
        before = perf_counter()
        self.base = values_of(self.twin.quiet)
        usual = SECONDS_A_MICRO_BATCH * len(self.twin.quiet.micro_batches)
        self.quiet_seconds = self.seconds = max(usual, perf_counter() - before)  # that a replay without noise takes
        self._replays = [self.base]  # of the run as it was, by seed
        if self.is_noisy:
            before = perf_counter()
            self._replays = [values_of(self.twin.replay(0))]
            self.seconds = perf_counter() - before  # that one with noise takes

    def replayed(self, seed: int) -> Values:
        """Return what the run as it was comes to on a seed."""
        while len(self._replays) <= seed:
            self._replays.append(values_of(self.twin.replay(len(self._replays))))
        return self._replays[seed]

    @property
    def is_noisy(self) -> bool:
        """Whether seeds differ."""
        return self.twin.is_noisy

    def is_trade(self, values: Values, metric: str, tolerance: float = TOLERANCE) -> bool:
        """Whether another metric than this one is longer than is tolerated."""
        return any(values[each] > (1 + tolerance) * self.base[each] for each in METRICS if each != metric)

    def screen(self, setting: Setting) -> Screening:
        """Replay another setting without noise."""
        record = self.twin.replay(None, setting)
        values = values_of(record)
        if self.shown is None:
            return Screening(values)
        ranks = setting.config.parallel.tp != self.twin.setting.config.parallel.tp
        return Screening(values, share_beyond(self.shown, record), ranks)

    def savings(
        self, setting: Setting, screening: Screening, seeds: int, error: Mapping[str, float]
    ) -> dict[str, Interval]:
        """Replay another setting on seeds, and return by metric the share that it saves.

        Args:
            setting: what is replayed.
            screening: its replay without noise, which serves where seeds do not differ.
            seeds: replays.
            error: the twin's own, by metric.
        """
        if not self.is_noisy:
            return self.rough(screening, error)
        bounds = self._bounds(setting) if screening.beyond > 0 else []
        base = [self.replayed(seed) for seed in range(seeds)]
        changed = [values_of(self.twin.replay(seed, setting)) for seed in range(seeds)]
        return {
            metric: interval_of(
                [each[metric] for each in base],
                [each[metric] for each in changed],
                self._model(metric, error, screening, bounds),
            )
            for metric in METRICS
        }

    def size(self, record: RunRecord, error: Mapping[str, float], metric: str) -> Interval:
        """Return the share of this very run that a replay saves, with how far stage times may put it off."""
        screening, model = Screening(values_of(record)), ModelError()
        if self.shown is not None:
            screening = replace(screening, beyond=share_beyond(self.shown, record))
            model = replace(self._model(metric, error, screening, is_another=False), relative=_CHANGE_ERROR / 2)
        return _interval(_log_ratio(self.base[metric], screening.values[metric]), 0.0, 0, model)

    def rough(self, screening: Screening, error: Mapping[str, float]) -> dict[str, Interval]:
        """Return the savings by a replay without noise, with the noise that replays of the run have had."""
        found = {}
        for metric in METRICS:
            own = [each[metric] for each in self._replays] if self.is_noisy else []
            ratio = _log_ratio(self.base[metric], screening.values[metric])
            model = self._model(metric, error, screening)
            found[metric] = _interval(ratio, 2 * _log_variance(own), len(own), model)
        return found

    def _bounds(self, setting: Setting) -> list[Values]:
        """Replay a setting with the shortest and the longest times of what is beyond the sizes of the run."""
        assert self.shown is not None
        shortest = BoundedCosts(setting.costs, self.shown, "shortest")
        longest = BoundedCosts(setting.costs, self.shown, "longest")
        return [values_of(self.twin.replay(None, replace(setting, costs=costs))) for costs in (shortest, longest)]

    def _model(
        self,
        metric: str,
        error: Mapping[str, float],
        screening: Screening,
        bounds: Sequence[Values] = (),
        *,
        is_another: bool = True,
    ) -> ModelError:
        """Return how far off learned stage times, and other runs of a real machine, may put a metric's ratio.

        Where times are not learned, they do not.
        """
        if self.shown is None:
            return ModelError()
        parts = (
            _FIT_ERROR[metric],
            _REPLAY_ERROR * error[metric],
            _BEYOND_ERROR * screening.beyond,
            _RANKS_ERROR * screening.other_ranks,
            math.sqrt(2) * _RUN_ERROR[metric] if self.twin.is_real and is_another else 0.0,
        )
        reach = [0.0, *(_log_ratio(screening.values[metric], each[metric]) for each in bounds)]
        return ModelError(_CHANGE_ERROR, math.hypot(*parts), min(reach), max(reach))


@dataclass(frozen=True, slots=True)
class Screening:
    """What a setting comes to without noise.

    Attributes:
        values: by metric.
        beyond: share of compute time in micro-batches of sizes that the run has not shown; 0 where stage times are not
            learned.
        other_ranks: whether its stages have another number of ranks than the run's.
    """

    values: Values
    beyond: float = 0.0
    other_ranks: bool = False


@dataclass(frozen=True, slots=True)
class ModelError:
    """How far stage times may put off the logarithm of changed / base.

    Attributes:
        relative: standard deviation, as a share of the logarithm.
        absolute: another.
        low: how much less it may be beyond the sizes that the run has shown, at most 0; high: how much more.
    """

    relative: float = 0.0
    absolute: float = 0.0
    low: float = 0.0
    high: float = 0.0


def share_beyond(shown: SizesShown, record: RunRecord) -> float:
    """Return the share of compute time in micro-batches of sizes that a run has not shown."""
    beyond = {each.micro_batch for each in record.micro_batches if not shown.hold(each)}
    if not beyond:
        return 0.0
    total = sum(span.end - span.begin for span in record.spans)
    return sum(span.end - span.begin for span in record.spans if span.micro_batch in beyond) / (total or 1.0)


def interval_of(base: Sequence[float], changed: Sequence[float], model: ModelError) -> Interval:
    """Return the share that a change saves, with the range of nine of ten pairs of runs: one as it was, one changed.

    Each of the two runs has noise of its own, which seeds show. The middle is the mean over the seeds, which are
    paired.

    Args:
        base: values of the run as it was, one for each seed.
        changed: the same of the change.
        model: how far stage times may put it off.
    """
    ratios = [_log_ratio(before, after) for before, after in zip(base, changed, strict=True)]
    noise = _log_variance(base) + _log_variance(changed)
    if len(ratios) > 1:
        noise += variance(ratios) / len(ratios)
    return _interval(fmean(ratios), noise, len(ratios), model)


def _interval(ratio: float, noise: float, count: int, model: ModelError) -> Interval:
    sure = t_quantile(_OUTSIDE, count - 1) if count > 1 else _Z
    spread = (sure * math.sqrt(noise), _Z * model.relative * ratio, _Z * model.absolute)
    most, least = ratio + math.hypot(*spread, model.high), ratio - math.hypot(*spread, model.low)
    return Interval(1 - math.exp(ratio), 1 - math.exp(most), 1 - math.exp(least))


def _log_ratio(before: float, after: float) -> float:
    return math.log(after / before) if before > 0 and after > 0 else 0.0


def _log_variance(values: Sequence[float]) -> float:
    logs = [math.log(value) for value in values if value > 0]
    return variance(logs) if len(logs) > 1 else 0.0
