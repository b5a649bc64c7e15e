"""Pictures of a search: capacity by chunk, and the fronts that nothing beats."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...conf.tuning import TailSlo
from ..report.chart import Axis, Chart, Series
from ..report.comparison_charts import pareto_front
from .search import Found
from .space import Candidate, chunk_key
from .trial import Trial


def charts(found: Found, slo: TailSlo) -> list[Chart]:
    """Those that have something to show."""
    drawn = [
        chunk_chart(found),
        front_chart(found, "tbt", "TBT", lambda trial: trial.tbt_p99_ms, slo.tbt_p99_ms),
        front_chart(found, "ttft", "TTFT", lambda trial: trial.ttft_p99_ms, slo.ttft_p99_ms),
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


Carried = tuple[Candidate, Trial]
Tail = Callable[[Trial], float | None]


def pareto(carried: Sequence[Carried], value: Tail) -> list[Carried]:
    """Those that none beats in both requests/s and the tail `value`, by rising tail."""
    known = [(tail, one) for one in carried if (tail := value(one[1])) is not None]
    points = [(tail, trial.rate) for tail, (_, trial) in known]
    return [known[at][1] for at in sorted(pareto_front(points), key=points.__getitem__)]


def front_chart(found: Found, name: str, what: str, value: Tail, bound: float | None) -> Chart:
    """Every rate that a setting carried on the whole workload. The front is blue; each of its settings is named at the
    highest rate that it holds there."""
    best = pareto(found.carried, value)
    highest = dict(best)  # later ones carry more
    rest = [trial for candidate, trial in found.carried if (candidate, trial) not in best]
    series = [_points(rest, value, "s7")]
    series.append(_points([trial for candidate, trial in best if trial is not highest[candidate]], value, "s0"))
    series += [_points([trial], value, "s0", candidate.label) for candidate, trial in highest.items()]
    marks = (("SLO", bound),) if bound is not None else ()
    return Chart(
        f"rate_against_{name}", f"Requests/s against the p99 of {what}", "scatter", Axis(f"p99 of {what}", "ms", None),
        Axis("carried", "requests/s", None), tuple(s for s in series if len(s.x)), marks,
        note="Every rate that a setting carried on all requests. Blue: none carries more with a shorter tail.",
    )  # fmt: skip


def _points(trials: Sequence[Trial], value: Callable[[Trial], float | None], colour: str, name: str = "") -> Series:
    x = np.array([value(trial) for trial in trials], np.float64)
    y = np.array([trial.rate for trial in trials], np.float64)
    return Series("", x, y, colour, (name,) if name else ())
