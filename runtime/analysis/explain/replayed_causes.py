"""Measures the cost of each cause of a run: the run minus a replay of its twin without the cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from ....conf.errors import ConfigError
from ...core.run_record import RunRecord
from ...pipeline.protocol import PipelineError
from ..ledger.ledger import Ledger
from .explanation import Interval, seconds_of
from .roots import TUNING, Root
from .sized_cause import COMPUTE, SizedCause
from .twin import Twin, values_of
from .what_if import WhatIf
from .without import Without, twins_without

_LEAST_TAIL = 0.25  # least share of a tail latency worth fixing: tails vary with each arrival
_LEAST_OF_MEMORY = 0.3  # least share of a run worth fixing, for a KV cache that already has all device memory
_MUCH_MORE = 1.2  # ratio by which a setting must save more than another cause to rank before it
_LEAST_OF_REAL = 0.1  # least share of a real run: two of the same setting differ by 4% and more
_OF_REAL = 3  # ratio of the saving required of a setting in a real run to that in a simulated one
_LIKELY_GAIN = 0.5  # least share of the required saving at which a further step of the key is worth trying
_LEAST_GAIN = 0.003  # extra share of the metric that a larger step of the same key must save

_WEIGHT = {**dict.fromkeys(TUNING, 1), Root.OVERLOAD: 1.25, Root.POLICY: 3}

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Replayed:
    """A twin without a cause, and the result of its replay."""

    without: Without
    record: RunRecord
    saves: Interval  # share of the metric
    base: WhatIf  # the unchanged run, which `saves` is relative to


@dataclass(frozen=True, slots=True)
class ReplayedCauses:
    """The causes of a run by replays.

    Attributes:
        causes: worth fixing, largest first.
        left: causes skipped for lack of time.
    """

    causes: tuple[SizedCause, ...]
    left: tuple[Root, ...]


def replayed_causes(
    what_if: WhatIf,
    ways: Sequence[Without],
    twin: Twin,
    metric: str,
    error: Mapping[str, float],
    stop: float,
    on_progress: OnProgress = lambda what, done, of: None,
) -> ReplayedCauses:
    """Replay a run without each cause that it may have, and return their costs.

    Args:
        what_if: the run's twin, or the twin of its first requests, with its unchanged replay.
        ways: variants of the twin without a cause, likeliest first.
        twin: the whole run's twin; the largest causes are measured with it, as far as time allows.
        metric: the metric by which causes are sized, one of `METRICS`.
        error: error of the twin's replay, by metric.
        stop: `perf_counter` value after which no replay is started.
        on_progress: called with the current step's name, the steps done and the total.
    """
    best: dict[Root, Replayed] = {}
    tried: Counter[Root] = Counter()
    left: list[Root] = []
    worse: set[Root] = set()  # causes whose last step saved nothing more
    for number, without in enumerate(ways):
        if without.cause in worse:
            continue
        if number and perf_counter() + what_if.quiet_seconds > stop:
            if without.likely >= _least(without, metric):
                left.append(without.cause)
            continue
        on_progress(without.cause.value.replace("_", " "), number, len(ways))
        tried[without.cause] += 1
        before = perf_counter()
        try:
            record = without.twin().replay()
        except (ConfigError, PipelineError):  # does not fit, or cannot be predicted
            continue
        what_if.quiet_seconds = max(what_if.quiet_seconds, perf_counter() - before)
        if without.change is not None and metric != "duration" and what_if.is_trade(values_of(record), metric):
            continue
        saves = what_if.size(record, error, metric)
        known = best.get(without.cause)
        if known is None or saves.middle > known.saves.middle + _LEAST_GAIN:
            best[without.cause] = Replayed(without, record, saves, what_if)
        elif without.cause in (Root.SMALL_CHUNK, Root.LARGE_CHUNK):
            gains = known.saves.middle / _least(without, metric)
            if tried[without.cause] > (3 if gains > 1 else 2 if gains > _LIKELY_GAIN else 1):
                worse.add(without.cause)
    order = sorted(
        (each for each in best.values() if _is_worth(each, metric, error)), key=lambda each: -each.saves.middle
    )
    if what_if.twin is not twin and order:
        whole, of_whole = WhatIf(twin), twins_without(twin, is_duration=False)
        for place, each in enumerate(order):
            if place and perf_counter() + whole.quiet_seconds > stop:  # the first is worth the wait
                break
            order[place] = _settled(each, whole, of_whole, metric, error)
    value = seconds_of(values_of(twin.base), metric)
    found = [_sized(each, value, twin.ledger, metric) for each in order if _is_worth(each, metric, error)]
    return ReplayedCauses(ranked(found), tuple(dict.fromkeys(left)))


def _settled(
    each: Replayed, whole: WhatIf, ways: Sequence[Without], metric: str, error: Mapping[str, float]
) -> Replayed:
    """Return a cause found on the first requests, measured on the whole run; unchanged if that is not possible."""
    change = each.without.change
    same = (way for way in ways if way.cause == each.without.cause and (change is None or way.change == change))
    way = next(same, None)
    if way is None:
        return each
    try:
        record = way.twin().replay()
    except (ConfigError, PipelineError):
        return each
    return Replayed(way, record, whole.size(record, error, metric), whole)


def _is_worth(each: Replayed, metric: str, error: Mapping[str, float]) -> bool:
    """Return whether a cause is significant and large enough.

    In a real run it must also exceed run-to-run variation and the error of the unchanged replay.
    """
    least, saves = _least(each.without, metric), each.saves
    if not each.base.twin.is_real:
        return saves.low > 0 and saves.middle >= least
    if saves.middle < abs(error[metric]):
        return False
    if each.without.cause in TUNING:
        return saves.low >= least and saves.middle >= _OF_REAL * least
    return saves.low > 0 and saves.middle >= max(least, _LEAST_OF_REAL)


def _least(without: Without, metric: str) -> float:
    """Return the least share of the metric for a cause to be worth fixing."""
    if metric != "duration":
        return _LEAST_TAIL
    if without.cause in (Root.KV_FULL, Root.PREEMPTION) and without.change is None:
        return _LEAST_OF_MEMORY
    return without.cause.least


def _sized(each: Replayed, value: float, run: Ledger, metric: str) -> SizedCause:
    """Return the cause with its cost; `value` is the run's own, in seconds."""
    without, saves = each.without, each.saves
    change = without.change
    cause = SizedCause(
        without.cause,
        value * saves.middle,
        value * saves.low,
        value * saves.high,
        saves.middle,
        without.stage,
        evidence=without.evidence,
        says=without.says,
    )
    if metric == "duration" and without.cause != Root.OVERLOAD:  # whose twin has other requests
        cause = replace(cause, shows=_shows(run, each.base.twin.quiet_ledger, each.record, value * saves.middle))
    if change is not None:
        cause = replace(cause, change=change.label, overrides=change.overrides, saves_seconds=value * saves.middle)
    return cause


def _shows(run: Ledger, base: Ledger, record: RunRecord, seconds: float) -> dict[str, float]:
    """Return the stage-seconds due to a cause: by the ledger's causes, and of compute.

    Each idle cause gets what it loses in the replay, scaled to the run; the rest of `seconds` on all stages is compute.

    Args:
        run: ledger of the run.
        base: ledger of its unchanged replay.
        record: record of the replay without the cause.
        seconds: cost of the cause.
    """
    before, after, own = base.seconds_by_cause(), Ledger(record).seconds_by_cause(), run.seconds_by_cause()
    scale = run.stage_seconds / (base.stage_seconds or 1.0)
    found = {str(cause): min(own[cause], scale * (before[cause] - after[cause])) for cause in own if own[cause] > 0}
    found[COMPUTE] = seconds * run.num_stages - sum(found.values())
    return found


def ranked(causes: Sequence[SizedCause]) -> tuple[SizedCause, ...]:
    """Return causes, largest first.

    Settings and policies also fix part of other causes, and an overload follows from whatever slows a run. So these
    rank before another cause only if they save much more.
    """
    return tuple(sorted(causes, key=lambda each: -each.seconds / _MUCH_MORE ** _WEIGHT.get(each.cause, 0)))
