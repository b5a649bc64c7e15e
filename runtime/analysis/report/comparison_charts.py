"""A chart over settings, from the medians of their runs: throughput against tail latency."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..drawing.chart import Axis, Chart, Series, series_colour
from .metrics import MAX_COLUMNS, THROUGHPUT, ranked, spread
from .run_groups import RunGroup

# Tail latencies, by key of summary.json: a short name for file names, and the label.
TAILS = {"p99_itl_ms": ("tbt", "p99 of TBT"), "p99_ttft_ms": ("ttft", "p99 of TTFT")}
MAX_NAMED = 8  # most points that are all named; with more, only those on the Pareto front are


def throughput_against(groups: Sequence[RunGroup], tail: str, sort: str = THROUGHPUT.key) -> Chart:
    """Build the scatter plot of output throughput against a tail latency, with a line through the Pareto front.

    Args:
        groups: The settings, one point each.
        tail: A key of `TAILS`.
        sort: Key of summary.json that ranks the groups if there are many: a point's number is then its group's rank, as
            in the table. With few groups it is the group's place.
    """
    order = {group.label: number for number, group in enumerate(groups)}
    listed = groups if len(groups) <= MAX_COLUMNS else ranked(groups, sort)
    numbers = {group.label: number for number, group in enumerate(listed, 1)}
    points = [
        (group.label, late.median, fast.median)
        for group in ranked(groups, THROUGHPUT.key)
        if (late := spread(group, tail)) is not None and (fast := spread(group, THROUGHPUT.key)) is not None
    ]
    best = pareto_front([(x, y) for _, x, y in points])
    many = len(points) > MAX_NAMED
    series = []
    for at, (label, x, y) in enumerate(points):
        colour = series_colour(order[label]) if not many else "s0" if at in best else "queue"
        shows_name, place = at in best or not many, (np.array([x]), np.array([y]))
        series.append(Series("", *place, colour, label, shows_name=shows_name, number=numbers[label]))
    series.sort(key=lambda s: not s.shows_name)  # names on the front are placed first
    line = sorted(points[at][1:] for at in best)
    short_name, name = TAILS[tail]
    explanation = (
        "the line joins the settings that none beats in both" if len(line) > 1 else "one setting is best in both"
    )
    return Chart(
        f"throughput_against_{short_name}",
        f"Throughput against the {name}",
        "scatter",
        Axis(name, "ms", None),
        Axis("output", "tok/s", None),
        tuple(series),
        line=tuple(line) if len(line) > 1 else (),
        note=f"Up and to the left is better; {explanation}.",
    )


def pareto_front(points: Sequence[tuple[float, float]]) -> set[int]:
    """Return the indices of the points on the Pareto front.

    Args:
        points: Latency (less is better) and throughput (more is better) of each point. Equal points on the front are
            all returned.
    """
    best: set[int] = set()
    highest = -np.inf
    for at in sorted(range(len(points)), key=lambda at: (points[at][0], -points[at][1])):
        is_equal = any(points[at] == points[other] for other in best)
        if points[at][1] > highest or is_equal:
            best.add(at)
            highest = max(highest, points[at][1])
    return best
