"""Explains a run: replays its twin unchanged and with changes, and ranks the changes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from time import perf_counter
from typing import Any, Literal

from ....conf.errors import ConfigError
from ...pipeline.protocol import PipelineError
from ...simulation.pipeline.setting import Setting
from .analysed_run import AnalysedRun
from .arrivals import clients_of
from .changes import Change, Shown, candidates, with_policy
from .even_split import even_split
from .explanation import METRIC_NAMES, METRICS, TOLERANCE, Explanation, Interval, Outcome, seconds_of
from .replayed_causes import ReplayedCauses, ranked, replayed_causes
from .roots import Root
from .sized_cause import SizedCause
from .span_replay import replayed_spans
from .twin import Twin, twin_of, values_of
from .what_if import SECONDS_A_MICRO_BATCH, Screening, WhatIf
from .without import twins_without

Objective = Literal["auto", "duration", "p99_itl_ms", "p99_ttft_ms"]
CommandOf = Callable[[Setting, Sequence[str]], str | None]  # (setting, its overrides) -> the run's command
OnProgress = Callable[[str, int, int], None]

_MOST_CHANGES = 8  # replayed with seeds
_MOST_OF_A_FAMILY = 2  # of them per family
_LEAST_GAIN = 0.005  # share of the metric that another layer split must save
_CAUSES_SHARE = 0.5  # of the time budget: one replay without each cause
_MOST_WHOLE = 5  # of these replays that must fit, else only the first requests are replayed
_QUICK_SHARE = 0.8  # like `_CAUSES_SHARE`, for `quick_explanation`, which shows only causes
_MOST_OF_A_CAUSE = 4  # replays per cause that should fit into that
_LEAST_CHANGE = 0.02  # share of the metric that a change must save to be named with a cause
_LEAST_TRADE = 0.2  # the same for a trade
_SCREENING_SHARE = 0.8  # of the time budget, at which screening stops: one noise-free replay per change
_LEAST_SEEDS = 3
_LEAST_OUTCOMES = 3  # replayed with seeds regardless of the time budget
_REPLAYS = 50  # that should fit into the time budget; else fewer requests are replayed
_LEAST_REQUESTS = 50
_ARRIVAL_BOUND = 1.1  # arrivals bound a makespan of at most this multiple of the last arrival
_NOTED_BEYOND = 0.05  # least share of compute time in sizes absent from the run to be noted
_NOTED_COST = 0.1  # least relative growth of another metric to be noted

_OF_SPANS = (Root.CONTENTION, Root.STRAGGLER, Root.RECOVERY)  # part of the noise in learned stage times

# Families of changes likely to help if this root is the largest, likeliest first.
_LIKELY: dict[Root, tuple[str, ...]] = {
    Root.MICRO_BATCHES: ("policy", "chunk"),
    Root.POLICY: ("policy", "chunk"),
    Root.LARGE_CHUNK: ("chunk", "policy", "grid"),
    Root.SLOW_STAGE: ("split", "policy"),
    Root.UNEVEN_LAYERS: ("split", "policy"),
    Root.LM_HEAD: ("split", "policy"),
    Root.DEPTH: ("depth", "policy"),
    Root.TRANSPORT: ("depth", "grid", "chunk"),
    Root.CONTROL: ("depth", "chunk", "policy"),
    Root.FEW_REQUESTS: ("clients", "depth", "admission", "grid"),
    Root.KV_FULL: ("memory", "admission", "grid"),
    Root.OVERLOAD: ("policy", "chunk", "grid", "admission"),
    Root.SMALL_CHUNK: ("chunk", "policy", "grid"),
    Root.SMALL_BATCH: ("admission", "memory", "grid", "policy"),
    Root.TENSOR_PARALLEL: ("grid", "chunk"),
    Root.LONG_PROMPTS: ("chunk", "policy", "grid"),
    Root.PREEMPTION: ("memory", "admission"),
}
_USUALLY = ("chunk", "policy", "split", "depth", "order", "admission", "memory", "grid", "iterations")


def explain(
    twin: Twin,
    *,
    seeds: int = 10,
    objective: Objective = "auto",
    tolerance: float = math.inf,
    seconds: float = 30.0,
    tried: Sequence[Mapping[str, Any]] = (),
    command_of: CommandOf = lambda setting, overrides: None,
    on_progress: OnProgress = lambda what, done, of: None,
) -> Explanation:
    """Explain a run by replays of its twin.

    Args:
        twin: the run's.
        seeds: replays per change, for the best changes.
        objective: the metric by which changes are ranked; `auto`: the duration, or a tail if arrivals bound it.
        tolerance: share by which another metric may grow; a change beyond that is a trade.
        seconds: approximate time budget; with less time fewer changes, seeds or requests are replayed.
        tried: changes to try instead of the generated ones, each as for `Twin.changed`.
        command_of: returns the run's command under another setting.
        on_progress: called with the current step's name, the steps done and the total.

    Raises:
        ConfigError: a change of `tried` is invalid or does not fit.
    """
    search = _Search(twin, objective, tolerance, perf_counter() + seconds, command_of, on_progress)
    return search.run(seeds, tried)


def quick_explanation(
    run: AnalysedRun, *, seconds: float = 2.0, command_of: CommandOf = lambda setting, overrides: None
) -> Explanation | None:
    """Explain a run in about `seconds`, for the end of a command: its causes only, largest first.

    None if the run cannot be replayed.
    """
    if run.fleet.is_several or not run.record.micro_batches or "requests" in run.record.unknown:
        return None
    until = perf_counter() + seconds
    try:
        twin = twin_of(run.record, run.ledger, run.info.config)
        search = _Search(twin, "auto", TOLERANCE, until, command_of, causes_share=_QUICK_SHARE)
        return search.quick()
    except (ConfigError, PipelineError):
        return None


@dataclass(frozen=True, slots=True)
class _Screened:
    """A change after its noise-free replay."""

    change: Change
    setting: Setting
    screening: Screening
    saves: float  # share of the metric
    is_trade: bool  # another metric grows beyond the tolerance


class _Search:
    """Searches for the changes that save most."""

    def __init__(
        self,
        twin: Twin,
        objective: Objective,
        tolerance: float,
        until: float,
        command_of: CommandOf,
        on_progress: OnProgress = lambda what, done, of: None,
        *,
        causes_share: float = _CAUSES_SHARE,
    ) -> None:
        self.twin = twin
        self.tolerance = tolerance
        self.until = until
        self.begun = perf_counter()
        self.command_of = command_of
        self.on_progress = on_progress
        self.left: list[str] = []  # changes skipped for lack of time
        self.refused: dict[str, str] = {}  # changes that do not fit or cannot be predicted, with the reason
        self.tried = 0
        self.run_values = values_of(twin.base)
        self.metric = self._metric(objective)
        self.causes = self._causes(self.begun + causes_share * (until - self.begun))

    @cached_property
    def what_if(self) -> WhatIf:
        """Replays of the twin with changes, cut to the first requests if time is short."""
        return self._within(_REPLAYS, self.until)

    def _within(self, replays: int, until: float) -> WhatIf:
        """Return the run's twin, cut to the first requests that can be replayed `replays` times by `until`."""
        left = until - perf_counter()
        each = SECONDS_A_MICRO_BATCH * len(self.twin.base.micro_batches)
        if each < left:
            whole = WhatIf(self.twin)
            each, left = whole.seconds, until - perf_counter()
            if replays * each <= left:
                return whole
        items = max(_LEAST_REQUESTS, round(left / (replays * each) * len(self.twin.items)))
        return WhatIf(self.twin, items=min(items, len(self.twin.items)))

    def _causes(self, stop: float) -> ReplayedCauses:
        """Return the cost of each cause, by a replay without it."""
        is_duration = self.metric == "duration"
        ways = twins_without(self.twin, is_duration=is_duration)
        counts = Counter(way.cause for way in ways)
        replays = sum(min(_MOST_OF_A_CAUSE, count) for count in counts.values())
        what_if = self._within(1 + min(_MOST_WHOLE, replays), stop)
        error = self.twin.error if self.twin.learned is not None else dict.fromkeys(METRICS, 0.0)
        if what_if.twin is not self.twin:
            ways = twins_without(what_if.twin, is_duration=is_duration)
        found = replayed_causes(what_if, ways, self.twin, self.metric, error, stop, self.on_progress)
        if self.twin.learned is None or not is_duration:
            return found
        beside = [each for each in replayed_spans(self.twin.base, self.twin.ledger) if each.cause in _OF_SPANS]
        return ReplayedCauses(ranked([*found.causes, *beside]), found.left)

    def _with_changes(self, outcomes: Sequence[Outcome]) -> Iterator[SizedCause]:
        """Yield the causes; one without a change of its own gets the best change from its likely families."""
        value = seconds_of(self.run_values, self.metric)
        for cause in self.causes.causes:
            families = _LIKELY.get(cause.cause, ())
            of_it = [each for each in outcomes if each.family in families and self._is_worth(each)]
            if not cause.change and not of_it and cause.cause == Root.SLOW_STAGE:
                cause = self._with_split(cause, value)
            elif not cause.change and of_it:
                best = max(of_it, key=lambda each: (not each.is_trade, each.saves[self.metric].middle))
                saves = value * best.saves[self.metric].middle
                cause = replace(
                    cause, change=best.change, overrides=best.overrides, saves_seconds=saves, note=best.note
                )
            yield cause

    def _is_worth(self, each: Outcome) -> bool:
        saves = each.saves[self.metric]
        return saves.low > 0 and saves.middle >= (_LEAST_TRADE if each.is_trade else _LEAST_CHANGE)

    def _with_split(self, cause: SizedCause, value: float) -> SizedCause:
        """Return a slow stage's cause with the layer split that balances the stages, if that saves time."""
        if (split := self._even_split()) is None:
            return cause
        screened = self._screen(split)
        if screened.saves < _LEAST_GAIN:
            return cause
        return replace(cause, change=split.label, overrides=split.overrides, saves_seconds=value * screened.saves)

    def _even_split(self) -> Change | None:
        return even_split(self.twin.setting, self.twin.changed, self.twin.base.micro_batches)

    def quick(self) -> Explanation:
        """Return an explanation with causes only, each with the best change from its likely families."""
        families = {family for each in self.causes.causes if not each.change for family in _LIKELY.get(each.cause, ())}
        outcomes = []
        if families:
            likely = [each for each in self._candidates() if each.family in families]
            for each in self._screen_all(likely, self.until):
                outcomes.append(self._outcome(each, self.what_if.rough(each.screening, self.twin.error)))
        return self._explanation([], outcomes, seeds=0)

    def run(self, seeds: int, tried: Sequence[Mapping[str, Any]] = ()) -> Explanation:
        """Return the explanation by the changes of `tried`, or by generated ones."""
        screened = list(self._tried(tried)) if tried else self._screened()
        chosen = screened if tried else _choice(screened)
        seeds = self._affordable(seeds, len(chosen))
        outcomes = []
        for number, each in enumerate(chosen):
            if number >= _LEAST_OUTCOMES and perf_counter() > self.until:
                break
            self.on_progress(each.change.label, number, len(chosen))
            saves = self.what_if.savings(each.setting, each.screening, seeds, self.twin.error)
            outcomes.append(self._outcome(each, saves))
        outcomes.sort(key=lambda outcome: _place(outcome.saves[self.metric], is_trade=outcome.is_trade))
        return self._explanation(outcomes, outcomes, seeds=seeds)

    def _outcome(self, each: _Screened, saves: Mapping[str, Interval]) -> Outcome:
        change, overrides, note = each.change, each.change.overrides, self._note(each, saves)
        command = self.command_of(each.setting, overrides)
        return Outcome(
            change.label, overrides, command, saves, note, each.screening.beyond, each.is_trade, change.family
        )

    def _explanation(self, outcomes: Sequence[Outcome], undoing: Sequence[Outcome], *, seeds: int) -> Explanation:
        """Return the explanation; a cause without a change of its own gets the best of `undoing`."""
        return Explanation(
            metric=self.metric,
            run=self.run_values,
            error=self.twin.error,
            outcomes=tuple(outcomes),
            requests=len(self.twin.items),
            replayed=len(self.what_if.twin.items) if seeds else len(self.twin.items),
            seeds=seeds,
            notes=tuple(self.twin.notes),
            causes=tuple(self._with_changes(undoing)),
            left=tuple(each.value.replace("_", " ") for each in self.causes.left),
            tried=self.tried,
            left_changes=tuple(dict.fromkeys(self.left)),
            refused=self.refused,
        )

    @cached_property
    def likely(self) -> tuple[str, ...]:
        """The families of changes likely to help, by the largest cause."""
        causes = self.causes.causes
        return _LIKELY.get(causes[0].cause, ()) if causes else ()

    def _metric(self, objective: Objective) -> str:
        """Return the metric by which changes are ranked.

        If arrivals bound the duration, it is p99 TTFT if requests wait for admission, else p99 TBT.
        """
        if objective != "auto":
            return objective
        if clients_of(self.twin.base):
            return "duration"
        last = max(item.arrival for item in self.twin.items)
        if self.run_values["duration"] > _ARRIVAL_BOUND * last:
            return "duration"
        return "p99_ttft_ms" if any(each.num_waiting for each in self.twin.base.micro_batches) else "p99_itl_ms"

    def _tried(self, tried: Sequence[Mapping[str, Any]]) -> Iterator[_Screened]:
        for values in tried:
            if "scheduler" in values:
                kept = with_policy(self.twin.setting.config.scheduler, str(values["scheduler"]))
                values = {**kept.values, **values}
            yield self._screen(Change("own", values))

    def _screened(self) -> list[_Screened]:
        """Return the candidates with their noise-free replays, as many as fit into the time."""
        stop = self.begun + _SCREENING_SHARE * (self.until - self.begun)
        return list(self._screen_all(self._candidates(), stop))

    def _candidates(self) -> list[Change]:
        """Return the changes of the run's setting, likeliest first."""
        by_family: dict[str, list[Change]] = {family: [] for family in (*self.likely, *_USUALLY)}
        for change in candidates(self.twin.setting, Shown.of(self.twin.base, self.twin.ledger)):
            if change.family != "grid" or self.twin.learned is None:  # learned times are of the run's grid
                by_family[change.family].append(change)
        if (split := self._even_split()) is not None:
            by_family["split"].append(split)
        rounds = zip_longest(*by_family.values())  # the first of each family, then the second of each
        return [change for one_of_each in rounds for change in one_of_each if change is not None]

    def _screen_all(self, changes: Sequence[Change], stop: float) -> Iterator[_Screened]:
        for number, change in enumerate(changes):
            if perf_counter() + self.what_if.quiet_seconds > stop:
                self.left += [each.label for each in changes[number:]]
                return
            self.on_progress(change.label, number, len(changes))
            try:
                yield self._screen(change)
            except (ConfigError, PipelineError) as error:
                self.refused[change.label] = str(error)

    def _screen(self, change: Change) -> _Screened:
        setting = self.twin.changed(change.values)
        screening = self.what_if.screen(setting)
        self.tried += 1
        before = self.what_if.base[self.metric]
        saves = 1 - screening.values[self.metric] / before if before else 0.0
        is_trade = self.what_if.is_trade(screening.values, self.metric, self.tolerance)
        return _Screened(change, setting, screening, saves, is_trade)

    def _affordable(self, seeds: int, chosen: int) -> int:
        """Return how many seeds fit into the time budget."""
        if not self.what_if.twin.is_noisy:
            return 1
        left = self.until - perf_counter()
        return max(_LEAST_SEEDS, min(seeds, int(left / max(1e-9, self.what_if.seconds * (chosen + 1)))))

    def _note(self, each: _Screened, saves: Mapping[str, Interval]) -> str:
        notes = []
        if each.screening.beyond > _NOTED_BEYOND:
            share = f"{each.screening.beyond:.0%}"
            notes.append(f"{share} of its compute time is in micro-batch sizes absent from the run")
        for metric in METRICS:
            if metric != self.metric and saves[metric].middle < -_NOTED_COST:
                what = "the run" if metric == "duration" else METRIC_NAMES[metric]
                notes.append(f"{what} is {1 - saves[metric].middle:.2g}x as long")
        return "; ".join(notes)


def _choice(screened: Sequence[_Screened]) -> list[_Screened]:
    """Return the changes that save most, a few per family, trades last."""
    chosen: list[_Screened] = []
    for each in sorted(screened, key=lambda each: (each.is_trade, -each.saves, len(each.change.overrides))):
        alike = sum(other.change.family == each.change.family for other in chosen)
        is_same = any(other.screening.values == each.screening.values for other in chosen)
        if each.saves > 0 and alike < _MOST_OF_A_FAMILY and not is_same:
            chosen.append(each)
    return chosen[:_MOST_CHANGES]


def _place(saves: Interval, *, is_trade: bool) -> tuple[bool, bool, float]:
    """Return the sort key of an outcome.

    Savings whose 90% interval is above 0 come first, by the low end, trades last. The others follow, by the mean of the
    low end and the middle, so that a large uncertain gain comes before a small uncertain one.
    """
    is_sure = saves.low > 0
    return not is_sure, is_trade, -saves.low if is_sure else -(saves.low + saves.middle) / 2
