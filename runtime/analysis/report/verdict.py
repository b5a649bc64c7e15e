"""The verdict of a comparison in words: what is fastest, by how much, and at what cost in tail latency."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.numbers import ms_text
from .metrics import THROUGHPUT, Metric, Spread, metric_of, ranked, ratio_text, row_unit, spread
from .run_groups import RunGroup

TAILS = (metric_of("p99_itl_ms"), metric_of("p99_ttft_ms"))
_ALIKE = 0.005  # largest relative difference of medians at which single runs tie; repeats tie if their ranges overlap
_MAX_NAMED = 3  # settings named in a sentence; for more, only their number and the first


def verdict(groups: Sequence[RunGroup]) -> list[str]:
    """Return the verdict as sentences; empty if there is nothing to compare.

    The baseline is the first setting. Settings tie if the ranges of their repeats overlap.
    """
    speeds = {group.label: found for group in groups if (found := spread(group, THROUGHPUT.key, groups[0])) is not None}
    if len(speeds) < 2:
        return []
    order = [group for group in ranked(groups, THROUGHPUT.key) if group.label in speeds]
    fastest, baseline = order[0], groups[0]
    tied = [group for group in order if ties(speeds[fastest.label], speeds[group.label])]
    sentences = [_speed(order, tied, baseline, speeds)]
    other = order[-1] if fastest is baseline else baseline
    if other not in tied:
        sentences += _cost(fastest, other)
    shortest = _shortest_tail(groups, fastest)
    sentences += [shortest] if shortest else []
    sentences.append(_noise(groups))
    return sentences


def ties(a: Spread, b: Spread) -> bool:
    """Return whether two settings tie: the ranges of their repeats overlap, or single runs are nearly equal."""
    if len(a.values) > 1 or len(b.values) > 1:
        return a.low <= b.high and b.low <= a.high
    return abs(a.median - b.median) <= _ALIKE * max(abs(a.median), abs(b.median))


def _speed(order: Sequence[RunGroup], tied: Sequence[RunGroup], baseline: RunGroup, speeds: dict[str, Spread]) -> str:
    """Name the fastest setting, and its speed-up over the baseline, or over the next one if it is the baseline."""
    fastest = order[0]
    unit = row_unit(THROUGHPUT, [s.median for s in speeds.values()])

    def speed(group: RunGroup) -> str:
        return unit.text(speeds[group.label].median)

    def between(ends: Sequence[RunGroup]) -> str:
        low, high = speed(ends[-1]), speed(ends[0])
        return low if low == high else f"{low} to {high}"

    if len(tied) == len(order):
        all_of_them = "Both settings" if len(order) == 2 else f"All {len(order)} settings"
        return f"{all_of_them} tie: {between(order)} output tok/s."
    if len(tied) > 1:
        first = f"{_names(tied)} tie as the fastest: {between(tied)} output tok/s"
    else:
        first = f"{fastest.label} is the fastest: {speed(fastest)} output tok/s"
    if baseline in tied or baseline.label not in speeds:
        rest = next(group for group in order if group not in tied)
        ratio = speeds[fastest.label].median / speeds[rest.label].median if speeds[rest.label].median else 0.0
        return f"{first}, {ratio_text(ratio)} times the next, {rest.label} ({speed(rest)})."
    ratio = speeds[fastest.label].ratio or 0.0
    return f"{first}, {ratio_text(ratio)} times the first setting, {baseline.label} ({speed(baseline)})."


def _cost(fastest: RunGroup, other: RunGroup) -> list[str]:
    """Compare the fastest setting's tail latencies with those of another one."""
    parts = []
    for metric in TAILS:
        mine, base = spread(fastest, metric.key, other), spread(other, metric.key)
        if mine is None or base is None:
            continue
        texts = f"{ms_text(mine.median)} against {ms_text(base.median)}"
        if ties(mine, base):
            parts.append(f"the {_name(metric)} ties ({texts})")
        else:
            word = "longer" if mine.median > base.median else "shorter"
            parts.append(f"the {_name(metric)} is {word} ({texts}, {ratio_text(mine.ratio or 0.0)} times)")
    return [f"Compared with {other.label}, {' and '.join(parts)}."] if parts else []


def _shortest_tail(groups: Sequence[RunGroup], fastest: RunGroup) -> str:
    """Name the settings with the shortest tails, if these are not the fastest one."""
    parts = []
    for metric in TAILS:
        known = [(found, group) for group in groups if (found := spread(group, metric.key)) is not None]
        if not known:
            continue
        best, holder = min(known, key=lambda pair: pair[0].median)
        mine = spread(fastest, metric.key)
        if mine is not None and holder is not fastest and not ties(best, mine):
            alike = [group for found, group in known if ties(best, found)]
            parts.append(f"{_name(metric)} with {_names(alike)} ({ms_text(best.median)})")
    return f"The shortest {' and the shortest '.join(parts)}." if parts else ""


def _noise(groups: Sequence[RunGroup]) -> str:
    """Return a sentence on the variation between repeats."""
    repeats = min(len(group.runs) for group in groups)
    if repeats > 1:
        return "Medians over the repeats; settings whose repeats overlap are called ties."
    return "Each setting ran once, so the noise is not known; repeats=5 shows it." if len(groups) > 1 else ""


def _name(metric: Metric) -> str:
    what, _, percentile = metric.name.partition(" ")
    return f"{percentile} {what}"


def _names(groups: Sequence[RunGroup]) -> str:
    if len(groups) > _MAX_NAMED:
        return f"{len(groups)} settings, {groups[0].label} first,"
    *most, last = [group.label for group in groups]
    return f"{', '.join(most)} and {last}" if most else last
