"""Charts of distributions of times: cumulative distributions and histograms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...core.micro_batch_columns import Floats
from ...core.numbers import number_text
from .chart import Axis, Chart, Series, series_colour
from .formatting import time_unit
from .thinning import thin_cdf

_MAX_BINS = 48
# Ends of time axes, as multiples of the p99.
_LONG_TAIL = 2.5  # a cumulative distribution is cut if its longest time is beyond this
_CUT_AT = 1.5  # end of the axis of a cut distribution
_HISTOGRAM_END = 1.3


@dataclass(frozen=True, slots=True)
class Quantity:
    """A time whose distribution is drawn.

    Attributes:
        name: File name of the figure.
        title: Heading of the figure.
        label: Label of the time axis.
        counted: What each value belongs to, such as "requests".
    """

    name: str
    title: str
    label: str
    counted: str


def cdf(quantity: Quantity, seconds: Mapping[str, Floats], *, colours: Sequence[str] = (), note: str = "") -> Chart:
    """Build a chart of cumulative distributions of times. The legend shows the medians.

    If the longest time is far beyond the largest p99, the axis ends before it and the note says so.

    Args:
        quantity: What is drawn.
        seconds: Its values by label.
        colours: One colour per label; empty: the default series colours.
        note: Text below the chart.
    """
    arrays = _with_values(seconds, colours)
    high = largest_value(list(seconds.values()))
    tail = max((float(np.percentile(values, 99)) for _, values, _ in arrays), default=high)
    shown = high if high <= _LONG_TAIL * tail or tail <= 0 else _CUT_AT * tail
    unit, factor = time_unit(shown)
    series = []
    for label, values, colour in arrays:
        reached, shares = thin_cdf(np.sort(values))
        text = f"{label}: p50 {number_text(float(np.median(values)) * factor)} {unit}"
        series.append(Series(text, reached * factor, shares, colour))
    if shown < high:
        note = f"{note} The axis ends before the longest, {number_text(high * factor)} {unit}.".strip()
    x = Axis(quantity.label, unit, 0.0, shown * factor if shown < high else None)
    y = Axis(f"share of {quantity.counted}", "", 0.0, 1.0)
    return Chart(quantity.name, quantity.title, "cdf", x, y, tuple(series), note=note)


def histogram(quantity: Quantity, seconds: Mapping[str, Floats], *, colours: Sequence[str] = ()) -> Chart:
    """Build a histogram of times over common bins. Arguments as for `cdf`. A single series gets p50, p90, p99 marks.

    Times beyond 1.3 times the largest p99 are counted in the last bin, and the note says so.
    """
    arrays = _with_values(seconds, colours)
    if not arrays:
        return Chart(quantity.name, quantity.title, "histogram", Axis(quantity.label), Axis(quantity.counted), ())
    high = max(_HISTOGRAM_END * max(float(np.percentile(values, 99)) for _, values, _ in arrays), 1e-9)
    longest = largest_value([values for _, values, _ in arrays])
    high = min(longest, high)
    low = min(float(values.min()) for _, values, _ in arrays)
    low = 0.0 if low < 0.3 * high else low
    high = max(high, low + 1e-9)
    unit, factor = time_unit(high)
    bins = min(_MAX_BINS, max(10, int(2.0 * min(len(values) for _, values, _ in arrays) ** 0.5)))
    edges = np.linspace(low, high, bins + 1) * factor
    series = []
    for label, values, colour in arrays:
        counts, _ = np.histogram(np.clip(values, low, high), bins=bins, range=(low, high))
        series.append(Series(label, edges, counts.astype(np.float64), colour))
    marks: tuple[tuple[str, float], ...] = ()
    if len(arrays) == 1:
        places = np.percentile(arrays[0][1], [50, 90, 99]) * factor
        marks = tuple(zip(("p50", "p90", "p99"), places.tolist(), strict=True))
    note = f"The last bin holds all beyond, up to {number_text(longest * factor)} {unit}." if longest > high else ""
    x, y = Axis(quantity.label, unit, low * factor, high * factor), Axis(quantity.counted, whole=True)
    return Chart(quantity.name, quantity.title, "histogram", x, y, tuple(series), marks, note=note)


def _with_values(seconds: Mapping[str, Floats], colours: Sequence[str]) -> list[tuple[str, Floats, str]]:
    """Return label, times and colour of each series that has times."""
    colours = colours or [series_colour(number) for number in range(len(seconds))]
    return [(*pair, colour) for pair, colour in zip(seconds.items(), colours, strict=True) if len(pair[1])]


def largest_value(arrays: Sequence[Floats]) -> float:
    """Return the largest of all values; 0 if there are none."""
    return max((float(values.max()) for values in arrays if len(values)), default=0.0)
