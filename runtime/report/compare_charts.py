"""Charts over settings, of their medians: a scatter of two metrics, and a heat map where two keys vary."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .candidates import Candidate, differing_keys, settings
from .charts import Axis, Chart, Series, series_colour
from .metrics import THROUGHPUT, metric_of, ranked, spread

TAIL = "p99_itl_ms"


def throughput_against_tail(candidates: Sequence[Candidate]) -> Chart:
    """Output throughput over the p99 of TBT, a point a setting, the fastest named first."""
    points = []
    order = {candidate.label: number for number, candidate in enumerate(candidates)}
    for candidate in ranked(candidates, THROUGHPUT.key):
        number = order[candidate.label]
        x, y = spread(candidate, TAIL), spread(candidate, THROUGHPUT.key)
        if x is not None and y is not None:
            points.append((number, candidate.label, x.median, y.median))
    many = len(points) > 8
    series = tuple(
        Series("", np.array([x]), np.array([y]), "s0" if many else series_colour(number), (label,))
        for number, label, x, y in points
    )
    return Chart(
        "throughput_against_tbt", "Throughput against the p99 of TBT", "scatter",
        Axis("p99 of TBT", "ms", None), Axis("output", "tok/s", None), series, note="Up and to the left is better.",
    )  # fmt: skip


def heat_map(candidates: Sequence[Candidate], sort: str) -> Chart | None:
    """The medians of `sort` over the two keys that vary; None where others than exactly two do."""
    points = [settings(candidate.runs[0].config) for candidate in candidates]
    keys = differing_keys(points)
    if len(keys) != 2 or any(key not in point for point in points for key in keys):
        return None
    across, up = (_ordered(points, key) for key in keys)
    table = np.full((len(up), len(across)), np.nan)
    for candidate, point in zip(candidates, points, strict=True):
        found = spread(candidate, sort)
        if found is not None:
            table[up.index(_text(point[keys[1]])), across.index(_text(point[keys[0]]))] = found.median
    metric = metric_of(sort)
    x = np.arange(len(across), dtype=np.float64)
    rows = tuple(Series(name, x, table[row], "chunk") for row, name in enumerate(up))
    title = metric.name + (f" ({metric.unit})" if metric.unit else "")
    return Chart(
        "heat_map", f"{title} by {_short(keys[0])} and {_short(keys[1])}", "heat", Axis(keys[0]), Axis(keys[1]), rows,
        categories=tuple(across),
    )  # fmt: skip


def _ordered(points: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    """A key's values: numbers ascending, then the others as they came."""
    values = {_text(point[key]): point[key] for point in points}
    numbers = [text for text, value in values.items() if isinstance(value, int | float)]
    return sorted(numbers, key=lambda text: values[text]) + [text for text in values if text not in numbers]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _short(key: str) -> str:
    return key.removesuffix(".name").rpartition(".")[2] if key.endswith(".name") else key.rpartition(".")[2]
