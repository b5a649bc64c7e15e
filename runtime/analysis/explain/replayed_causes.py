"""Sizes the causes of a run: the run less its twin without each cause, by replays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from ...conf.errors import ConfigError
from ..core.run_record import RunRecord
from ..ledger.ledger import Ledger
from ..pipeline.protocol import PipelineError
from .explanation import Interval, seconds_of
from .roots import TUNING, Root
from .sized_cause import COMPUTE, SizedCause
from .twin import Twin, values_of
from .what_if import WhatIf
from .without import Without, twins_without

_LEAST_TAIL = 0.25  # of a tail latency, which varies with each arrival: less is not worth mending
_LEAST_OF_MEMORY = 0.3  # of a run, the same of a KV cache that has all memory of its devices
_MUCH_MORE = 1.2  # times another cause that a setting, or another policy, must save to come before it
_LEAST_OF_REAL = 0.1  # of a real run: two of the same setting differ by 4% and more
_OF_REAL = 3  # times as much must another setting of a real run save as one of a simulated run
_LIKELY_GAIN = 0.5  # of the least, from which on a further step of a key may come to it
_LEAST_GAIN = 0.003  # of the metric that a larger step of the same key must save on top

_WEIGHT = {**dict.fromkeys(TUNING, 1), Root.OVERLOAD: 1.25, Root.POLICY: 3}

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Replayed:
    """A twin without a cause, and what its replay came to."""

    without: Without
    record: RunRecord
    saves: Interval  # share of the metric
    base: WhatIf  # the run as it was, of which that is a share


@dataclass(frozen=True, slots=True)
class ReplayedCauses:
    """The causes of a run by replays.

    Attributes:
        causes: that are worth mending, the largest first.
        left: causes for which no time was left.
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
    """Replay a run without each cause that it may have, and return what they cost.

    Args:
        what_if: the run's twin, or that of its first requests, with its replay as it was.
        ways: to make that twin without a cause, the likeliest first.
        twin: of the whole run: the largest causes are sized by it, as far as there is time.
        metric: by which causes are sized, of `METRICS`.
        error: the twin's own, by metric.
        stop: of `perf_counter`, after which nothing more is replayed.
        on_progress: is called with what is under way, and how many of how many are over.
    """
    best: dict[Root, Replayed] = {}
    tried: Counter[Root] = Counter()
    left: list[Root] = []
    worse: set[Root] = set()  # of which a further step saved nothing more
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
        except (ConfigError, PipelineError):  # it does not fit, or cannot be foretold
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
    """Return a cause that the first requests showed, sized by the whole run; the same where that does not fit."""
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
    """Return whether a cause is sure and large enough.

    A real run's must exceed what two such runs differ by, and what the replay of the run as it was is off by, too.
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
    """Return the share of the metric below which a cause is not worth mending."""
    if metric != "duration":
        return _LEAST_TAIL
    if without.cause in (Root.KV_FULL, Root.PREEMPTION) and without.change is None:
        return _LEAST_OF_MEMORY
    return without.cause.least


def _sized(each: Replayed, value: float, run: Ledger, metric: str) -> SizedCause:
    """Return the cause with what it costs; `value` is the run's own, in seconds."""
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
    if metric == "duration" and without.cause != Root.OVERLOAD:  # of which the twin has other requests
        cause = replace(cause, shows=_shows(run, each.base.twin.quiet_ledger, each.record, value * saves.middle))
    if change is not None:
        cause = replace(cause, change=change.label, overrides=change.overrides, saves_seconds=value * saves.middle)
    return cause


def _shows(run: Ledger, base: Ledger, record: RunRecord, seconds: float) -> dict[str, float]:
    """Return the stage-seconds that go with a cause: by the ledger's causes, and of compute.

    An idle time loses the share that it loses in the replay; the rest of `seconds` on all stages is compute.

    Args:
        run: ledger of the run.
        base: ledger of its replay as it was.
        record: of its replay without the cause.
        seconds: that the cause costs the run.
    """
    before, after, own = base.seconds_by_cause(), Ledger(record).seconds_by_cause(), run.seconds_by_cause()
    scale = run.stage_seconds / (base.stage_seconds or 1.0)
    found = {str(cause): min(own[cause], scale * (before[cause] - after[cause])) for cause in own if own[cause] > 0}
    found[COMPUTE] = seconds * run.num_stages - sum(found.values())
    return found


def ranked(causes: Sequence[SizedCause]) -> tuple[SizedCause, ...]:
    """Return causes, the largest first.

    A setting undoes some of each fault, and another policy some of each setting: they come first only where they save
    much more. A queue that grows comes of what makes a run longer, where that costs about as much.
    """
    return tuple(sorted(causes, key=lambda each: -each.seconds / _MUCH_MORE ** _WEIGHT.get(each.cause, 0)))
