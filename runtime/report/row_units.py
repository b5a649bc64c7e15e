"""One unit for all values of a row or column of a comparison, and how many decimals they have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..drawing.formatting import time_unit
from .metrics import Metric


@dataclass(frozen=True, slots=True)
class RowUnit:
    """How the values of a row are written.

    Attributes:
        name: The unit, for the row's head; empty: a plain number.
        factor: What a value of `summary.json` is multiplied with to be in the unit.
        decimals: Digits after the point.
    """

    name: str
    factor: float
    decimals: int

    def text(self, value: float) -> str:
        """Write a value without its unit."""
        if value == 0.0:
            return "0"
        return f"{value * self.factor:,.{self.decimals}f}"


def row_unit(metric: Metric, values: Sequence[float]) -> RowUnit:
    """Choose the unit in which `values` of `metric` read well: the largest has about three significant digits."""
    largest = max((abs(value) for value in values), default=0.0)
    if metric.kind in ("ms", "seconds"):
        in_seconds = 1e-3 if metric.kind == "ms" else 1.0
        name, per_second = time_unit(largest * in_seconds) if largest else ("s", 1.0)
        factor = in_seconds * per_second
        return RowUnit(metric.time_prefix + name, factor, _decimals(largest * factor))
    if metric.kind == "share":
        return RowUnit("%", 100.0, 1)
    if metric.kind == "count" and (largest >= 100 or all(value == round(value) for value in values)):
        return RowUnit(metric.unit, 1.0, 0)
    return RowUnit(metric.unit, 1.0, _decimals(largest))


def ratio_text(ratio: float) -> str:
    """Write a ratio with two or three significant digits: `1.15`, `12.3`, `0.012`."""
    if ratio < 0.1:
        return f"{ratio:.2g}"
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}" if ratio < 100 else f"{ratio:,.0f}"


def _decimals(largest: float) -> int:
    return 0 if largest >= 100 else 1 if largest >= 10 else 2
