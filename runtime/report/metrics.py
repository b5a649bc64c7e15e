"""What a comparison says of each group: the numbers, how they are written, which way is better, their spread."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from ..ledger.ledger import CAUSES
from .formatting import cause_label, ms_text, percent_text, seconds_text
from .run_groups import RunGroup

Kind = Literal["rate", "ms", "share", "seconds", "count", "ratio"]
LOWER_WORDS = ("_ms", "bubble", "starved", "idle", "cv_", "preemptions", "failed", "duration", "error")


@dataclass(frozen=True, slots=True)
class Metric:
    """A number of `summary.json`, at `key` (a dot leads into a nested object)."""

    key: str
    name: str
    kind: Kind
    unit: str = ""
    judged: bool = True  # one way is better

    @property
    def lower_is_better(self) -> bool:
        return lower_is_better(self.key)

    def text(self, value: float | None) -> str:
        """The value for people, with its unit; a dash where there is none."""
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
class Spread:
    """A metric over a group's repeats. `ratio` is the median over the first group's; None where that has
    none, or is 0."""

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
IDLE = (
    Metric("bubble_fraction", "idle", "share"),
    Metric("bubble_fraction_inner", "idle, inner", "share"),
    Metric("median_bubble_ms_per_request", "bubbles a request, p50", "ms"),
)
BY_CAUSE = tuple(Metric(f"bubble_seconds.{cause}", cause_label(cause), "seconds") for cause in CAUSES)
EVENNESS = (
    Metric("cv_stage_time", "cv of stage time", "ratio"),
    Metric("micro_batches", "micro-batches", "count", judged=False),
    Metric("mean_tokens_per_micro_batch", "tokens a micro-batch", "count", judged=False),
    Metric("prediction_error.median", "prediction error, p50", "share"),
    Metric("prediction_error.p90", "prediction error, p90", "share"),
    Metric("peak_kv_fraction", "KV peak", "share", judged=False),
    Metric("preemptions", "preemptions", "count"),
    Metric("completed", "completed", "count", judged=False),
    Metric("failed", "failed", "count"),
)
METRICS = (*SPEED, *LATENCY, *IDLE, *BY_CAUSE, *EVENNESS)


def metric_of(key: str) -> Metric:
    """The metric of that key, one made of its name where it is none of ours."""
    kind: Kind = "ms" if key.endswith("_ms") else "seconds" if "seconds" in key else "ratio"
    return next((metric for metric in METRICS if metric.key == key), Metric(key, key.replace("_", " "), kind))


def lower_is_better(key: str) -> bool:
    return any(word in key for word in LOWER_WORDS)


def number(summary: Mapping[str, Any], key: str) -> float | None:
    """The number at `key`; None where the run has none (an older folder, nothing predicted, no SLO)."""
    value: Any = summary
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def number_keys(summary: Mapping[str, Any]) -> list[str]:
    """All keys of a summary that hold a number, nested ones dotted; its config and versions are no results."""
    keys = []
    for name, value in summary.items():
        inner = [f"{name}.{key}" for key in value] if isinstance(value, Mapping) else [name]
        keys += [key for key in inner if number(summary, key) is not None]
    return [key for key in keys if not key.startswith(("config.", "versions."))]


def spread(group: RunGroup, key: str, first: RunGroup | None = None) -> Spread | None:
    """Over the runs that have the number; None if none has. The ratio is to `first`."""
    values = [value for run in group.runs if (value := number(run.summary, key)) is not None]
    if not values:
        return None
    middle = float(median(values))
    base = spread(first, key) if first is not None else None
    ratio = middle / base.median if base is not None and base.median else None
    return Spread(tuple(values), middle, min(values), max(values), ratio)


def ranked(groups: Sequence[RunGroup], sort: str) -> list[RunGroup]:
    """Best first by the median of `sort`; those without it last, ties in the order given."""
    sign = 1.0 if lower_is_better(sort) else -1.0

    def place(group: RunGroup) -> float:
        found = spread(group, sort)
        return math.inf if found is None else sign * found.median

    return sorted(groups, key=place)


def best_of(metric: Metric, found: Sequence[Spread | None]) -> str | None:
    """The best median as it is written; None where they are all written alike, or no way is better."""
    medians = [s.median for s in found if s is not None]
    if not metric.judged or len({metric.text(value) for value in medians}) < 2:
        return None
    return metric.text((min if metric.lower_is_better else max)(medians))


def has_any(groups: Sequence[RunGroup], metric: Metric) -> bool:
    """Whether a row of it says anything: some run has it, and for times by cause it is not 0 everywhere."""
    found = [spread(group, metric.key) for group in groups]
    if metric in BY_CAUSE or metric.key in ("preemptions", "failed"):
        return any(s is not None and s.high > 0 for s in found)
    return any(s is not None for s in found)
