"""Replays of a run's twin under other settings, paired by seed with replays of the unchanged run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, variance
from time import perf_counter

from ...core.run_record import RunRecord
from ...core.student import t_quantile
from ...simulation.pipeline.setting import Setting
from .explanation import METRICS, TOLERANCE, Interval
from .observations import SizesShown
from .twin import Twin, Values, values_of

_OUTSIDE = 0.1  # of outcomes, on both sides of an interval
_Z = 1.6449  # normal quantile of a two-sided 90% interval
_REPLAY_ERROR = 0.5  # share of the twin's own error that may remain in a change's ratio
# Standard deviations of the log ratio predicted by learned stage times. `_FIT_ERROR` is from savings predicted by
# twins of simulated runs, learned as for real runs, against the true ones (docs/explain.md#how-good-ranges-are).
_FIT_ERROR = {"duration": 0.006, "p99_itl_ms": 0.04, "p99_ttft_ms": 0.01}
# Variation between real runs of the same setting, started anew: more than within a single run. Pooled over settings
# rerun alternately on two shared CPU cores (docs/explain.md#what-the-ranges-mean).
_RUN_ERROR = {"duration": 0.024, "p99_itl_ms": 0.05, "p99_ttft_ms": 0.03}
_CHANGE_ERROR = 0.1  # relative to the change's effect
_BEYOND_ERROR = 0.1  # per share of compute time in sizes that the run has not shown
# In addition for the ranges of savings. Tails have all of it from a share of `_TAIL_SHARE` on.
_UNSEEN_ERROR = {"duration": 0.12, "p99_itl_ms": 0.25, "p99_ttft_ms": 0.2}
_TAIL_SHARE = 0.05
SECONDS_A_MICRO_BATCH = 60e-6  # of a replay, including the analysis of its record; measured, compiled


class WhatIf:
    """A run's twin, and its replays so far.

    Args:
        twin: the run's.
        items: number of requests to replay, from the first; None: all.
    """

    def __init__(self, twin: Twin, *, items: int | None = None) -> None:
        self.twin = twin if items is None else replace(twin, items=twin.items[:items], is_whole=False)
        self.shown = None if twin.learned is None else twin.learned.fit.shown
        before = perf_counter()
        self.base = values_of(self.twin.quiet)
        usual = SECONDS_A_MICRO_BATCH * len(self.twin.quiet.micro_batches)
        self.quiet_seconds = self.seconds = max(usual, perf_counter() - before)  # of a replay without noise
        self._replays = [self.base]  # of the unchanged run, by seed
        if self.twin.is_noisy:
            before = perf_counter()
            self._replays = [values_of(self.twin.replay(0))]
            self.seconds = perf_counter() - before  # of a replay with noise

    def replayed(self, seed: int) -> Values:
        """Return the metrics of the unchanged run's replay with a seed."""
        while len(self._replays) <= seed:
            self._replays.append(values_of(self.twin.replay(len(self._replays))))
        return self._replays[seed]

    def is_trade(self, values: Values, metric: str, tolerance: float = TOLERANCE) -> bool:
        """Whether another metric than this one grows beyond the tolerance."""
        return any(values[each] > (1 + tolerance) * self.base[each] for each in METRICS if each != metric)

    def screen(self, setting: Setting) -> Screening:
        """Replay another setting without noise."""
        record = self.twin.replay(None, setting)
        values = values_of(record)
        if self.shown is None:
            return Screening(values)
        return Screening(values, share_beyond(self.shown, record))

    def savings(
        self, setting: Setting, screening: Screening, seeds: int, error: Mapping[str, float]
    ) -> dict[str, Interval]:
        """Replay another setting with seeds, and return the share saved, by metric.

        Args:
            setting: what is replayed.
            screening: the setting's replay without noise, used if seeds make no difference.
            seeds: number of replays.
            error: error of the twin's replay, by metric.
        """
        if not self.twin.is_noisy:
            return self.rough(screening, error)
        base = [self.replayed(seed) for seed in range(seeds)]
        changed = [values_of(self.twin.replay(seed, setting)) for seed in range(seeds)]
        return {
            metric: interval_of(
                [each[metric] for each in base],
                [each[metric] for each in changed],
                self._of_savings(metric, error, screening),
            )
            for metric in METRICS
        }

    def size(self, record: RunRecord, error: Mapping[str, float], metric: str) -> Interval:
        """Return the share of this particular run that a replay saves, with the model error of stage times."""
        screening, model = Screening(values_of(record)), ModelError()
        if self.shown is not None:
            screening = replace(screening, beyond=share_beyond(self.shown, record))
            model = replace(self._model(metric, error, screening, is_another=False), relative=_CHANGE_ERROR / 2)
        return _interval(_log_ratio(self.base[metric], screening.values[metric]), 0.0, 0, model)

    def rough(self, screening: Screening, error: Mapping[str, float]) -> dict[str, Interval]:
        """Return the savings by a replay without noise, with the noise of the unchanged run's replays."""
        found = {}
        for metric in METRICS:
            own = [each[metric] for each in self._replays] if self.twin.is_noisy else []
            ratio = _log_ratio(self.base[metric], screening.values[metric])
            model = self._model(metric, error, screening)
            found[metric] = _interval(ratio, 2 * _log_variance(own), len(own), model)
        return found

    def _of_savings(self, metric: str, error: Mapping[str, float], screening: Screening) -> ModelError:
        """Return the model error of a saving, which depends more on sizes that the run has not shown."""
        model = self._model(metric, error, screening)
        share = screening.beyond if metric == "duration" else min(1.0, screening.beyond / _TAIL_SHARE)
        return replace(model, absolute=math.hypot(model.absolute, _UNSEEN_ERROR[metric] * share))

    def _model(
        self, metric: str, error: Mapping[str, float], screening: Screening, *, is_another: bool = True
    ) -> ModelError:
        """Return the error of a metric's log ratio due to learned stage times and to variation between real runs.

        It is zero if times are not learned.
        """
        if self.shown is None:
            return ModelError()
        parts = (
            _FIT_ERROR[metric],
            _REPLAY_ERROR * error[metric],
            _BEYOND_ERROR * screening.beyond,
            math.sqrt(2) * _RUN_ERROR[metric] if self.twin.is_real and is_another else 0.0,
        )
        return ModelError(_CHANGE_ERROR, math.hypot(*parts))


@dataclass(frozen=True, slots=True)
class Screening:
    """The metrics of a setting's replay without noise.

    Attributes:
        values: by metric.
        beyond: share of compute time in micro-batches of sizes that the run has not shown; 0 if stage times are not
            learned.
    """

    values: Values
    beyond: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelError:
    """Model error of the logarithm of changed / base, due to stage times.

    Attributes:
        relative: standard deviation relative to the logarithm.
        absolute: additional standard deviation.
    """

    relative: float = 0.0
    absolute: float = 0.0


def share_beyond(shown: SizesShown, record: RunRecord) -> float:
    """Return the share of compute time in micro-batches of sizes that a run has not shown."""
    beyond = {each.micro_batch for each in record.micro_batches if not shown.hold(each)}
    if not beyond:
        return 0.0
    total = sum(span.end - span.begin for span in record.spans)
    return sum(span.end - span.begin for span in record.spans if span.micro_batch in beyond) / (total or 1.0)


def interval_of(base: Sequence[float], changed: Sequence[float], model: ModelError) -> Interval:
    """Return the share that a change saves, with its 90% interval over pairs of runs: one unchanged, one changed.

    Each run of a pair has its own noise, estimated over the seeds. The middle is the mean over paired seeds.

    Args:
        base: values of the unchanged run, one per seed.
        changed: values with the change, one per seed.
        model: model error of the ratio.
    """
    ratios = [_log_ratio(before, after) for before, after in zip(base, changed, strict=True)]
    noise = _log_variance(base) + _log_variance(changed)
    if len(ratios) > 1:
        noise += variance(ratios) / len(ratios)
    return _interval(fmean(ratios), noise, len(ratios), model)


def _interval(ratio: float, noise: float, count: int, model: ModelError) -> Interval:
    sure = t_quantile(_OUTSIDE, count - 1) if count > 1 else _Z
    spread = math.hypot(sure * math.sqrt(noise), _Z * model.relative * ratio, _Z * model.absolute)
    return Interval(1 - math.exp(ratio), 1 - math.exp(ratio + spread), 1 - math.exp(ratio - spread))


def _log_ratio(before: float, after: float) -> float:
    return math.log(after / before) if before > 0 and after > 0 else 0.0


def _log_variance(values: Sequence[float]) -> float:
    logs = [math.log(value) for value in values if value > 0]
    return variance(logs) if len(logs) > 1 else 0.0
