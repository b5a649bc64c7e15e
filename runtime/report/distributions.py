"""Charts of distributions of times: cumulative distributions and histograms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..core.micro_batch_columns import Floats
from .chart import Axis, Chart, Series
from .formatting import number_text, time_unit
from .thinning import thin_cdf

_MAX_BINS = 48
# Ends of time axes, as multiples of the p99.
_LONG_TAIL = 2.5  # a cumulative distribution is cut if its longest time is beyond this
_CUT_AT = 1.5  # where it is cut
_HISTOGRAM_END = 1.3


def cdf(
    name: str,
    title: str,
    quantity: str,
    seconds: Mapping[str, Floats],
    colours: Sequence[str],
    *,
    counted: str,
    note: str = "",
) -> Chart:
    """Make a chart of cumulative distributions of times. The legend shows the medians.

    If the longest time is far beyond the largest p99, the axis ends before it and the note says so.

    Args:
        name: File name of the figure.
        title: Heading of the figure.
        quantity: Label of the time axis.
        seconds: Times by label.
        colours: A colour for each label.
        counted: What the values belong to, such as "requests".
        note: Text below the chart.
    """
    high = largest_value(list(seconds.values()))
    tail = max((float(np.percentile(values, 99)) for values in seconds.values() if len(values)), default=high)
    shown = high if high <= _LONG_TAIL * tail or tail <= 0 else _CUT_AT * tail
    unit, factor = time_unit(shown)
    series = []
    for (label, values), colour in zip(seconds.items(), colours, strict=True):
        if len(values):
            x, y = thin_cdf(np.sort(values))
            text = f"{label}: p50 {number_text(float(np.median(values)) * factor)} {unit}"
            series.append(Series(text, x * factor, y, colour))
    if shown < high:
        note = f"{note} The axis ends before the longest, {number_text(high * factor)} {unit}.".strip()
    axis = Axis(quantity, unit, 0.0, shown * factor if shown < high else None)
    return Chart(name, title, "cdf", axis, Axis(f"share of {counted}", "", 0.0, 1.0), tuple(series), note=note)


def histogram(
    name: str, title: str, quantity: str, seconds: Mapping[str, Floats], colours: Sequence[str], *, counted: str
) -> Chart:
    """Make a histogram of times over common bins. A single series has its p50, p90 and p99 marked.

    Times beyond 1.3 times the largest p99 are counted in the last bin, and the note says so.

    Args:
        name: File name of the figure.
        title: Heading of the figure.
        quantity: Label of the time axis.
        seconds: Times by label.
        colours: A colour for each label.
        counted: What the values belong to, such as "requests".
    """
    arrays = {label: values for label, values in seconds.items() if len(values)}
    if not arrays:
        return Chart(name, title, "histogram", Axis(quantity), Axis(counted), ())
    high = max(_HISTOGRAM_END * max(float(np.percentile(values, 99)) for values in arrays.values()), 1e-9)
    longest = largest_value(list(arrays.values()))
    high = longest if longest <= high else high
    low = min(float(values.min()) for values in arrays.values())
    low = 0.0 if low < 0.3 * high else low
    high = max(high, low + 1e-9)
    unit, factor = time_unit(high)
    fewest = min(len(values) for values in arrays.values())
    bins = min(_MAX_BINS, max(10, int(2.0 * fewest**0.5)))
    edges = np.linspace(low, high, bins + 1) * factor
    series = []
    for (label, values), colour in zip(seconds.items(), colours, strict=True):
        if len(values):
            counts, _ = np.histogram(np.clip(values, low, high), bins=bins, range=(low, high))
            series.append(Series(label, edges, counts.astype(np.float64), colour))
    marks: tuple[tuple[str, float], ...] = ()
    if len(arrays) == 1:
        (values,) = arrays.values()
        places = np.percentile(values, [50, 90, 99]) * factor
        marks = tuple(zip(("p50", "p90", "p99"), places.tolist(), strict=True))
    note = f"The last bin holds all beyond, up to {number_text(longest * factor)} {unit}." if longest > high else ""
    x, y = Axis(quantity, unit, low * factor, high * factor), Axis(counted, whole=True)
    return Chart(name, title, "histogram", x, y, tuple(series), marks, note=note)


def largest_value(arrays: Sequence[Floats]) -> float:
    """Return the largest of all values; 0 if there are none."""
    return max((float(values.max()) for values in arrays if len(values)), default=0.0)
