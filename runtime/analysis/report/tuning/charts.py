"""Charts of a search: capacity by chunk, and rate against tail latency with its Pareto front."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from .....conf.tuning import TailSlo
from ....simulation.tuning.search_result import SearchResult
from ....simulation.tuning.space import Candidate, chunk_key
from ....simulation.tuning.trial import Trial
from ...drawing.chart import Axis, Chart, Series, stacked_bars
from ..comparison_charts import pareto_front


def charts(found: SearchResult, slo: TailSlo) -> list[Chart]:
    """Build the charts of a search, without empty ones."""
    drawn = [
        chunk_chart(found),
        front_chart(found, "tbt", "TBT", lambda trial: trial.tbt_p99_ms, slo.tbt_p99_ms),
        front_chart(found, "ttft", "TTFT", lambda trial: trial.ttft_p99_ms, slo.ttft_p99_ms),
    ]
    return [chart for chart in drawn if not chart.is_empty]


def chunk_chart(found: SearchResult) -> Chart:
    """Build the bars of the winner's capacity with each chunk size."""
    if not found.chunks:
        return stacked_bars("capacity_by_chunk", "", Axis("capacity"), [], {})
    winner = found.chunks[0][0]
    title = f"Capacity by {chunk_key(winner.policy)}: {winner.grid} {winner.policy.name}"
    rows = [(f"{candidate.chunk}", {"carried": capacity.rate}) for candidate, capacity in found.chunks]
    return stacked_bars("capacity_by_chunk", title, Axis("capacity", "requests/s"), rows, {"carried": "chunk"})


CarriedTrial = tuple[Candidate, Trial]
Tail = Callable[[Trial], float | None]  # reads a tail latency of a trial


def pareto(carried: Sequence[CarriedTrial], value: Tail) -> list[CarriedTrial]:
    """Return the Pareto front of rate against the tail latency `value`, by rising latency."""
    known = [(tail, one) for one in carried if (tail := value(one[1])) is not None]
    points = [(tail, trial.rate) for tail, (_, trial) in known]
    return [known[at][1] for at in sorted(pareto_front(points), key=points.__getitem__)]


def front_chart(found: SearchResult, name: str, what: str, value: Tail, bound: float | None) -> Chart:
    """Build the scatter plot of rates carried on the whole workload against a tail latency.

    The Pareto front is blue. Each setting on it is named at its highest rate there.

    Args:
        found: The result of the search.
        name: Short name of the latency, for the figure's file.
        what: Name of the latency in the chart.
        value: Reads the latency of a trial, in milliseconds.
        bound: Its SLO in milliseconds; None: no SLO.
    """
    best = pareto(found.carried, value)
    highest = dict(best)  # rates rise along the front, so each setting keeps its last and highest
    rest = [trial for candidate, trial in found.carried if (candidate, trial) not in best]
    series = [_points(rest, value, "s7")]
    series.append(_points([trial for candidate, trial in best if trial is not highest[candidate]], value, "s0"))
    numbers = {label: place for place, label in enumerate(dict.fromkeys(one.label for one, _ in found.carried), 1)}
    series += [
        replace(_points([trial], value, "s0", candidate.label), number=numbers[candidate.label])
        for candidate, trial in highest.items()
    ]
    marks = (("SLO", bound),) if bound is not None else ()
    return Chart(
        f"rate_against_{name}",
        f"Requests/s against the p99 of {what}",
        "scatter",
        Axis(f"p99 of {what}", "ms", None),
        Axis("carried", "requests/s", None),
        tuple(s for s in series if len(s.x)),
        marks,
        note="Every rate that a setting carried on all requests. Blue: none carries more with a shorter tail.",
    )


def _points(trials: Sequence[Trial], value: Callable[[Trial], float | None], colour: str, name: str = "") -> Series:
    x = np.array([value(trial) for trial in trials], np.float64)
    y = np.array([trial.rate for trial in trials], np.float64)
    return Series("", x, y, colour, name)
