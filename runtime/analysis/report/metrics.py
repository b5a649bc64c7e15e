"""The metrics of a comparison: their format, whether lower is better, and their spread over repeated runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from ...core.numbers import ms_text, percent_text, seconds_text
from ..drawing.formatting import cause_label, time_unit
from ..ledger.causes import CAUSES
from .run_groups import RunGroup

Kind = Literal["rate", "ms", "share", "seconds", "count", "ratio"]
MAX_COLUMNS = 8  # settings with one table column each; more settings are listed as a ranking
# A metric whose key contains one of these is better if it is lower.
LOWER_IS_BETTER = ("_ms", "bubble", "starved", "recovery", "idle", "cv_", "preemptions", "failed", "duration", "error")


@dataclass(frozen=True, slots=True)
class Metric:
    """A number of `summary.json`.

    Attributes:
        key: Its key; a dot leads into a nested object.
        name: Its name in tables.
        kind: How it is formatted.
        unit: Its unit; empty if the formatted value contains it.
        judged: Whether it can be better or worse. If not, no value is marked as the best.
        time_prefix: Prefix of the unit of a time: "stage-" for a total over stages.
    """

    key: str
    name: str
    kind: Kind
    unit: str = ""
    judged: bool = True
    time_prefix: str = ""

    @property
    def lower_is_better(self) -> bool:
        """Whether lower values are better."""
        return lower_is_better(self.key)

    def text(self, value: float | None) -> str:
        """Format a value; a dash for None."""
        if value is None or not math.isfinite(value):
            return "-"
        if self.kind == "ms":
            return ms_text(value)
        if self.kind == "seconds":
            return seconds_text(value)
        if self.kind == "share":
            return percent_text(value)
        if self.kind == "count":
            return f"{value:,.0f}" if abs(value - round(value)) < 1e-9 or value >= 100 else f"{value:,.1f}"
        return f"{value:,.0f}" if value >= 1000 else f"{value:,.1f}" if value >= 10 else f"{value:.2f}"


@dataclass(frozen=True, slots=True)
class RowUnit:
    """How the values of a row are formatted.

    Attributes:
        name: The unit, for the row's head; empty: a plain number.
        factor: Factor from the value in `summary.json` to the unit.
        decimals: Digits after the point.
    """

    name: str
    factor: float
    decimals: int

    def text(self, value: float) -> str:
        """Format a value without its unit."""
        if value == 0.0:
            return "0"
        return f"{value * self.factor:,.{self.decimals}f}"


@dataclass(frozen=True, slots=True)
class Spread:
    """A metric over the runs of a group.

    Attributes:
        values: Its value in each run.
        median: Median of the values.
        low, high: Lowest and highest value.
        ratio: The median over the first group's median; None if that is missing or 0.
    """

    values: tuple[float, ...]
    median: float
    low: float
    high: float
    ratio: float | None


THROUGHPUT = Metric("output_throughput", "output", "rate", "tok/s")
SPEED = (
    THROUGHPUT,
    Metric("total_token_throughput", "prompt + output", "rate", "tok/s"),
    Metric("request_throughput", "requests", "rate", "req/s"),
    Metric("request_goodput", "goodput", "rate", "req/s"),
    Metric("duration", "duration", "seconds"),
)
LATENCY = tuple(
    Metric(f"{statistic}_{key}_ms", f"{name} {short}", "ms")
    for key, name in (("ttft", "TTFT"), ("itl", "TBT"), ("tpot", "TPOT"), ("e2el", "E2E"))
    for statistic, short in (("median", "p50"), ("p90", "p90"), ("p99", "p99"))
)
KV_TRANSFERS = tuple(  # between a prefill and a decode pool
    Metric(f"{statistic}_{key}_ms", f"{name}, {short}", "ms")
    for key, name in (("kv_wait", "KV waits"), ("kv_transfer", "KV transfer"))
    for statistic, short in (("mean", "mean"), ("p99", "p99"))
)
IDLE = (
    Metric("bubble_fraction", "idle", "share"),
    Metric("bubble_fraction_inner", "bubbles", "share"),
    Metric("median_bubble_ms_per_request", "bubble time of a request, p50", "ms", time_prefix="stage-"),
)
BY_CAUSE = tuple(
    Metric(f"bubble_seconds.{cause}", cause_label(cause), "seconds", time_prefix="stage-") for cause in CAUSES
)
EVENNESS = (
    Metric("cv_stage_time", "cv of stage time", "ratio"),
    Metric("micro_batches", "micro-batches", "count", judged=False),
    Metric("mean_tokens_per_micro_batch", "tokens a micro-batch", "count", judged=False),
    Metric("accepted_tokens_per_decode", "accepted drafts a decode", "count"),
    Metric("draft_tokens", "draft tokens", "count", judged=False),
    Metric("prediction_error.median", "prediction error, p50", "share"),
    Metric("prediction_error.p90", "prediction error, p90", "share"),
    Metric("batch", "B", "count", judged=False),
    Metric("depth", "depth", "count", judged=False),
    Metric("peak_kv_fraction", "KV peak", "share", judged=False),
    Metric("preemptions", "preemptions", "count"),
    Metric("cached_input_tokens", "prompt tokens from the prefix cache", "count", judged=False),
    Metric("completed", "completed", "count", judged=False),
    Metric("failed", "failed", "count"),
    Metric("recovery_seconds", "time in faults", "seconds"),
)
_OFTEN_NONE = (
    *("preemptions", "failed", "recovery_seconds"),
    *("draft_tokens", "accepted_tokens_per_decode", "cached_input_tokens"),
)
SECTIONS = (SPEED, LATENCY, KV_TRANSFERS, IDLE, BY_CAUSE, EVENNESS)
METRICS = tuple(metric for section in SECTIONS for metric in section)
# Metrics of a ranking, most important first: the last ones are left out on narrow terminals.
_RANKED_BY = (
    *("output_throughput", "p99_itl_ms", "p99_ttft_ms", "bubble_fraction", "cv_stage_time", "median_itl_ms"),
    *("median_ttft_ms", "bubble_fraction_inner", "p99_e2el_ms", "total_token_throughput", "request_goodput"),
)


def metric_of(key: str) -> Metric:
    """Return the metric of a key. If it is not in `METRICS`, its name and kind are derived from the key."""
    kind: Kind = "ms" if key.endswith("_ms") else "seconds" if "seconds" in key else "ratio"
    return next((metric for metric in METRICS if metric.key == key), Metric(key, key.replace("_", " "), kind))


def lower_is_better(key: str) -> bool:
    """Return whether lower values of the number at `key` are better."""
    return any(word in key for word in LOWER_IS_BETTER)


def number(summary: Mapping[str, Any], key: str) -> float | None:
    """Return the number at `key` of a summary; None if missing, as without an SLO or in an older run folder."""
    value: Any = summary
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def number_keys(summary: Mapping[str, Any]) -> list[str]:
    """Return the keys of all numbers in a summary's results, nested ones dotted."""
    keys = []
    for name, value in summary.items():
        inner = [f"{name}.{key}" for key in value] if isinstance(value, Mapping) else [name]
        keys += [key for key in inner if number(summary, key) is not None]
    return [key for key in keys if not key.startswith(("config.", "versions."))]


def spread(group: RunGroup, key: str, first: RunGroup | None = None) -> Spread | None:
    """Compute a metric's spread over the runs of a group that have it; None if no run has it.

    Args:
        group: The runs.
        key: Key of summary.json.
        first: The group that the ratio refers to.
    """
    values = [value for run in group.runs if (value := number(run.summary, key)) is not None]
    if not values:
        return None
    middle = float(median(values))
    base = spread(first, key) if first is not None else None
    ratio = middle / base.median if base is not None and base.median else None
    return Spread(tuple(values), middle, min(values), max(values), ratio)


def ranked(groups: Sequence[RunGroup], sort: str) -> list[RunGroup]:
    """Sort groups by the median of `sort`, best first. Groups without it come last; ties keep their order."""
    sign = 1.0 if lower_is_better(sort) else -1.0

    def place(group: RunGroup) -> float:
        found = spread(group, sort)
        return math.inf if found is None else sign * found.median

    return sorted(groups, key=place)


def best_of(metric: Metric, found: Sequence[Spread | None]) -> str | None:
    """Return the best median as formatted; None if all are formatted alike or the metric is not judged."""
    medians = [s.median for s in found if s is not None]
    if not metric.judged or len({metric.text(value) for value in medians}) < 2:
        return None
    return metric.text((min if metric.lower_is_better else max)(medians))


def has_any(groups: Sequence[RunGroup], metric: Metric) -> bool:
    """Return whether a metric is worth a row.

    Some run must have it. Causes and metrics that are often 0 must not be 0 in all runs.
    """
    found = [spread(group, metric.key) for group in groups]
    if metric in BY_CAUSE or metric.key in _OFTEN_NONE:
        return any(s is not None and s.high > 0 for s in found)
    return any(s is not None for s in found)


def ranking_metrics(groups: Sequence[RunGroup], sort: str) -> list[Metric]:
    """Return the metrics of a ranking by `sort`, most important first."""
    metrics = [metric for metric in map(metric_of, _RANKED_BY) if has_any(groups, metric)]
    return metrics if sort in [metric.key for metric in metrics] else [metric_of(sort), *metrics]


def row_unit(metric: Metric, values: Sequence[float]) -> RowUnit:
    """Choose a readable unit for `values` of `metric`: the largest has about three significant digits."""
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
    """Format a ratio with two or three significant digits: `1.15`, `12.3`, `0.012`."""
    if ratio < 0.1:
        return f"{ratio:.2g}"
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}" if ratio < 100 else f"{ratio:,.0f}"


def _decimals(largest: float) -> int:
    return 0 if largest >= 100 else 1 if largest >= 10 else 2
