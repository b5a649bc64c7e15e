"""Charts over settings, from the medians of their runs: throughput against tail latency, and heat maps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.numbers import is_number
from ..drawing.chart import Axis, Chart, Series, series_colour
from .metrics import MAX_COLUMNS, THROUGHPUT, metric_of, ranked, spread
from .run_groups import RunGroup, differing_keys, settings

# Tail latencies, by key of summary.json: a short name for file names, and the label.
TAILS = {"p99_itl_ms": ("tbt", "p99 of TBT"), "p99_ttft_ms": ("ttft", "p99 of TTFT")}
MAX_NAMED = 8  # most points that are all named; with more, only those on the Pareto front are
MAX_HEAT_MAPS = 6


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


@dataclass(frozen=True, slots=True)
class Dimension:
    """A setting that is varied: a key, or several keys that vary together (`parallel.pp`, `parallel.tp`).

    Attributes:
        keys: The dotted keys.
        values: Their values in each setting, as text.
    """

    keys: tuple[str, ...]
    values: tuple[str, ...]

    @property
    def name(self) -> str:
        """The dotted keys, as text."""
        return ", ".join(self.keys)

    @property
    def short(self) -> str:
        """The last part of each key, as text."""
        return ", ".join(_last_part(key) for key in self.keys)


def dimensions(points: Sequence[Mapping[str, Any]]) -> list[Dimension]:
    """Return the dimensions that vary between settings. Keys that distinguish the same settings are one dimension.

    The value of a missing key is a dash.
    """
    found: dict[tuple[int, ...], list[str]] = {}
    for key in differing_keys(points):
        texts = [_text(point[key]) if key in point else "-" for point in points]
        found.setdefault(tuple(texts.index(text) for text in texts), []).append(key)
    return [
        Dimension(tuple(keys), tuple(", ".join(_text(p[key]) if key in p else "-" for key in keys) for p in points))
        for keys in found.values()
    ]


def heat_maps(groups: Sequence[RunGroup], sort: str) -> list[Chart]:
    """Build heat maps of the medians of `sort`, if two or three dimensions vary.

    With three dimensions there is one map per value of the dimension with the fewest values. All maps share one colour
    scale.
    """
    found = dimensions([settings(group.runs[0].config) for group in groups])
    if len(found) not in (2, 3):
        return []
    third = min(found, key=lambda d: len(set(d.values))) if len(found) == 3 else None
    across, up = (dimension for dimension in found if dimension is not third)
    apart = third.values if third else ("",) * len(groups)
    maps = list(dict.fromkeys(apart))
    if len(maps) > MAX_HEAT_MAPS:
        return []
    spreads = [spread(group, sort) for group in groups]
    medians = np.array([np.nan if each is None else each.median for each in spreads])
    shades = (float(np.nanmin(medians)), float(np.nanmax(medians))) if np.isfinite(medians).any() else None
    metric = metric_of(sort)
    shown = metric.name + (f" ({metric.unit})" if metric.unit else "")
    charts = []
    for number, value in enumerate(maps):
        kept = [at for at, own in enumerate(apart) if own == value]
        columns, rows = (_ordered([dimension.values[at] for at in kept]) for dimension in (across, up))
        table = np.full((len(rows), len(columns)), np.nan)
        for at in kept:
            table[rows.index(up.values[at]), columns.index(across.values[at])] = medians[at]
        x = np.arange(len(columns), dtype=np.float64)
        series = tuple(Series(row, x, cells, "chunk") for row, cells in zip(rows, table, strict=True))
        name, title = "heat_map", f"{shown} by {across.short} and {up.short}"
        if third:
            name, title = f"heat_map_{number}", f"{shown}: {third.short} = {value}"
        axes = Axis(across.name), Axis(up.name)
        charts.append(Chart(name, title, "heat", *axes, series, categories=tuple(columns), shades=shades))
    return charts


def _ordered(values: Sequence[str]) -> list[str]:
    """Return the distinct values: numbers first, ascending, then the others in their order."""
    distinct = list(dict.fromkeys(values))
    numbers = [text for text in distinct if is_number(text)]
    return sorted(numbers, key=float) + [text for text in distinct if text not in numbers]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "unset" if value is None else json.dumps(value)


def _last_part(key: str) -> str:
    """Return the last part of a dotted key; for `scheduler.name` it is `scheduler`."""
    return key.removesuffix(".name").rpartition(".")[2] if key.endswith(".name") else key.rpartition(".")[2]
