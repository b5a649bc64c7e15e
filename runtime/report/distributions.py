"""Charts of how times are distributed: cumulative over several runs, or a histogram."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..ledger.ledger import Floats
from .chart import Axis, Chart, Series
from .formatting import number_text, time_unit
from .thinning import thin_cdf

BINS = 48


def cdf(
    name: str, title: str, what: str, seconds: Mapping[str, Floats], colours: Sequence[str], *, of: str, note: str = ""
) -> Chart:
    """Cumulative distributions of times (`seconds` by label); the legend has the medians. The axis ends at the largest
    p99 x 1.5 where the tail goes far beyond."""
    high = longest(list(seconds.values()))
    tail = max((float(np.percentile(values, 99)) for values in seconds.values() if len(values)), default=high)
    shown = high if high <= 2.5 * tail or tail <= 0 else 1.5 * tail
    unit, factor = time_unit(shown)
    series = []
    for (label, values), colour in zip(seconds.items(), colours, strict=True):
        if len(values):
            x, y = thin_cdf(np.sort(values))
            text = f"{label}: p50 {number_text(float(np.median(values)) * factor)} {unit}"
            series.append(Series(text, x * factor, y, colour))
    if shown < high:
        note = f"{note} The axis ends before the longest, {number_text(high * factor)} {unit}.".strip()
    axis = Axis(what, unit, 0.0, shown * factor if shown < high else None)
    return Chart(name, title, "cdf", axis, Axis(f"share of {of}", "", 0.0, 1.0), tuple(series), note=note)


def histogram(
    name: str, title: str, what: str, seconds: Mapping[str, Floats], colours: Sequence[str], *, of: str
) -> Chart:
    """Distributions of times over common bins, with p50, p90, p99 marked where there is one series; what lies beyond
    1.3 times the largest p99 is in the last bin."""
    arrays = {label: values for label, values in seconds.items() if len(values)}
    if not arrays:
        return Chart(name, title, "histogram", Axis(what), Axis(of), ())
    high = max(1.3 * max(float(np.percentile(values, 99)) for values in arrays.values()), 1e-9)
    most = longest(list(arrays.values()))
    high = most if most <= high else high
    low = min(float(values.min()) for values in arrays.values())
    low = 0.0 if low < 0.3 * high else low
    high = max(high, low + 1e-9)
    unit, factor = time_unit(high)
    fewest = min(len(values) for values in arrays.values())
    bins = min(BINS, max(10, int(2.0 * fewest**0.5)))
    edges = np.linspace(low, high, bins + 1) * factor
    series = []
    for (label, values), colour in zip(seconds.items(), colours, strict=True):
        if len(values):
            counts, _ = np.histogram(np.clip(values, low, high), bins=bins, range=(low, high))
            series.append(Series(label, edges, counts.astype(np.float64), colour))
    marks: tuple[tuple[str, float], ...] = ()
    if len(arrays) == 1:
        (values,) = arrays.values()
        places = np.minimum(np.percentile(values, [50, 90, 99]), high) * factor
        marks = tuple(zip(("p50", "p90", "p99"), places.tolist(), strict=True))
    note = f"The last bin holds all beyond, up to {number_text(most * factor)} {unit}." if most > high else ""
    x, y = Axis(what, unit, low * factor, high * factor), Axis(of, whole=True)
    return Chart(name, title, "histogram", x, y, tuple(series), marks, note=note)


def longest(arrays: Sequence[Floats]) -> float:
    """The largest of all values; 0 without any."""
    return max((float(values.max()) for values in arrays if len(values)), default=0.0)
