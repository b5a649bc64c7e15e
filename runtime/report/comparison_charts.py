"""Charts over settings, of the medians of their runs: throughput against tail latency, and heat maps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..core.numbers import is_number
from .chart import Axis, Chart, Series, series_colour
from .metrics import MAX_COLUMNS, THROUGHPUT, metric_of, ranked, spread
from .run_groups import RunGroup, differing_keys, settings

# Tail latencies, by key of summary.json: a short name for files, and the label.
TAILS = {"p99_itl_ms": ("tbt", "p99 of TBT"), "p99_ttft_ms": ("ttft", "p99 of TTFT")}
MAX_NAMED = 8  # points that all have their names beside them; of more points only those on the Pareto front have
MAX_HEAT_MAPS = 6


def throughput_against(groups: Sequence[RunGroup], tail: str, sort: str = THROUGHPUT.key) -> Chart:
    """Make the scatter of output throughput against a tail latency, with a line through the Pareto front.

    Args:
        groups: The settings, each a point.
        tail: A key of `TAILS`.
        sort: Key of summary.json that ranks the groups where they are many: a point then has its group's rank as its
            number, as in the table. Of few groups it has the group's place.
    """
    points = []
    order = {group.label: number for number, group in enumerate(groups)}
    listed = groups if len(groups) <= MAX_COLUMNS else ranked(groups, sort)
    numbers = {group.label: number for number, group in enumerate(listed, 1)}
    for group in ranked(groups, THROUGHPUT.key):
        x, y = spread(group, tail), spread(group, THROUGHPUT.key)
        if x is not None and y is not None:
            points.append((order[group.label], group.label, x.median, y.median))
    best = pareto_front([(x, y) for *_, x, y in points])
    many = len(points) > MAX_NAMED
    series = [
        Series(
            "", np.array([x]), np.array([y]), ("s0" if at in best else "queue") if many else series_colour(number),
            (label,), shows_names=at in best or not many, number=numbers[label],
        )
        for at, (number, label, x, y) in enumerate(points)
    ]  # fmt: skip
    series.sort(key=lambda s: not s.shows_names)  # names on the front are placed first
    line = sorted((points[at][2], points[at][3]) for at in best)
    short_name, name = TAILS[tail]
    explanation = (
        "the line joins the settings that none beats in both" if len(line) > 1 else "one setting is best in both"
    )
    return Chart(
        f"throughput_against_{short_name}", f"Throughput against the {name}", "scatter", Axis(name, "ms", None),
        Axis("output", "tok/s", None), tuple(series), line=tuple(line) if len(line) > 1 else (),
        note=f"Up and to the left is better; {explanation}.",
    )  # fmt: skip


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
    """Something that varies between settings: a key, or several keys that vary together (`parallel.pp`, `parallel.tp`).

    Attributes:
        keys: The dotted keys.
        values: Their value in each setting, as text.
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
    """Return what varies between settings. Keys that distinguish the same settings are one dimension.

    A setting that does not have a key has a dash as its value.
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
    """Make heat maps of the medians of `sort`, if two or three dimensions vary.

    Of three, the one with the fewest values has a map for each value.
    """
    points = [settings(group.runs[0].config) for group in groups]
    found = dimensions(points)
    if len(found) not in (2, 3):
        return []
    third = min(found, key=lambda d: len(set(d.values))) if len(found) == 3 else None
    across, up = (dimension for dimension in found if dimension is not third)
    if third is None:
        return [_heat_map(groups, range(len(points)), across, up, sort)]
    values = list(dict.fromkeys(third.values))
    if len(values) > MAX_HEAT_MAPS:
        return []
    charts = [
        _heat_map(
            groups, [index for index, text in enumerate(third.values) if text == value], across, up, sort,
            f"{third.short} = {value}", f"_{number}",
        )
        for number, value in enumerate(values)
    ]  # fmt: skip
    cells = np.concatenate([series.y for chart in charts for series in chart.series])
    if not np.isfinite(cells).any():
        return charts
    return [replace(chart, shades=(float(np.nanmin(cells)), float(np.nanmax(cells)))) for chart in charts]


def _heat_map(
    groups: Sequence[RunGroup], kept: Sequence[int], across: Dimension, up: Dimension, sort: str, where: str = "",
    suffix: str = "",
) -> Chart:  # fmt: skip
    """Make one heat map.

    Args:
        groups: All settings.
        kept: Indices of those that the map shows.
        across, up: The dimensions of its columns and rows.
        sort: Key of the metric that it shows.
        where: What the settings it shows have in common, for the title.
        suffix: Suffix of the figure's file name.
    """
    columns, rows = (_ordered([dimension.values[at] for at in kept]) for dimension in (across, up))
    table = np.full((len(rows), len(columns)), np.nan)
    for at in kept:
        found = spread(groups[at], sort)
        if found is not None:
            table[rows.index(up.values[at]), columns.index(across.values[at])] = found.median
    metric = metric_of(sort)
    x = np.arange(len(columns), dtype=np.float64)
    series = tuple(Series(name, x, table[row], "chunk") for row, name in enumerate(rows))
    title = metric.name + (f" ({metric.unit})" if metric.unit else "")
    title += f": {where}" if where else f" by {across.short} and {up.short}"
    return Chart(
        f"heat_map{suffix}", title, "heat", Axis(across.name),
        Axis(up.name), series, categories=tuple(columns),
    )  # fmt: skip


def _ordered(values: Sequence[str]) -> list[str]:
    """Return each value once: numbers first, ascending, then the others in their order."""
    distinct = list(dict.fromkeys(values))
    numbers = [text for text in distinct if is_number(text)]
    return sorted(numbers, key=float) + [text for text in distinct if text not in numbers]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _last_part(key: str) -> str:
    """Return the last part of a dotted key; of `scheduler.name` it is `scheduler`."""
    return key.removesuffix(".name").rpartition(".")[2] if key.endswith(".name") else key.rpartition(".")[2]
