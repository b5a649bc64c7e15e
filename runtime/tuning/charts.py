"""Pictures of a search: capacity by chunk, and the fronts that nothing beats."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...conf.tuning import TailSlo
from ..report.charts import Axis, Chart, Series
from .search import Found, Tried
from .space import chunk_key
from .trial import Trial


def charts(found: Found, slo: TailSlo) -> list[Chart]:
    """Those that have something to show."""
    drawn = [
        chunk_chart(found),
        front_chart(found, slo, "tbt", "TBT", lambda trial: trial.tbt_p99_ms, slo.tbt_p99_ms),
        front_chart(found, slo, "ttft", "TTFT", lambda trial: trial.ttft_p99_ms, slo.ttft_p99_ms),
    ]
    return [chart for chart in drawn if not chart.is_empty]


def chunk_chart(found: Found) -> Chart:
    """The winner's capacity with each chunk."""
    rates = np.array([capacity.rate for _, capacity in found.chunks])
    names = tuple(f"{candidate.chunk}" for candidate, _ in found.chunks)
    key = chunk_key(found.chunks[0][0].policy) if found.chunks else "chunk"
    title = f"Capacity by {key}: {found.chunks[0][0].grid} {found.chunks[0][0].policy.name}" if found.chunks else ""
    series = Series("carried", np.arange(len(rates), dtype=np.float64), rates, "chunk")
    return Chart("capacity_by_chunk", title, "bars", Axis("capacity", "requests/s"), Axis(str(key)), (series,),
                 categories=names)  # fmt: skip


def pareto(found: Sequence[Tried], value: Callable[[Trial], float | None]) -> list[Tried]:
    """Those that no other beats in both requests/s and the tail `value`, by rising tail."""
    points = [(value(tried.at), -tried.at.rate, n) for n, tried in enumerate(found) if tried.at is not None]
    front: list[Tried] = []
    most = 0.0
    for _, rate, number in sorted(point for point in points if point[0] is not None):
        if -rate > most:
            most = -rate
            front.append(found[number])
    return front


def front_chart(
    found: Found, slo: TailSlo, name: str, what: str, value: Callable[[Trial], float | None], bound: float | None
) -> Chart:
    """Every setting at the highest rate that it was seen to carry; those of the front are named."""
    front = pareto(found.tried, value)
    rest = [t.at for t in found.tried if t.at is not None and t not in front and value(t.at) is not None]
    series = [_points(rest, value, "s7")]
    for tried in front:
        assert tried.at is not None
        series.append(_points([tried.at], value, "s0", tried.candidate.label))
    marks = (("SLO", bound),) if bound is not None else ()
    return Chart(
        f"rate_against_{name}", f"Requests/s against the p99 of {what}", "scatter", Axis(f"p99 of {what}", "ms", None),
        Axis("carried", "requests/s", None), tuple(s for s in series if len(s.x)), marks,
        note="Each setting at the highest rate it was seen to carry; named: no other carries more with a shorter tail. "
        "Settings that left the race early were seen on fewer requests.",
    )  # fmt: skip


def _points(trials: Sequence[Trial], value: Callable[[Trial], float | None], colour: str, name: str = "") -> Series:
    x = np.array([value(trial) for trial in trials], np.float64)
    y = np.array([trial.rate for trial in trials], np.float64)
    return Series("", x, y, colour, (name,) if name else ())
