"""The charts of runs. Charts of several runs take their data by label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ...core.micro_batch_columns import Floats
from ...core.numbers import percent_text
from ..drawing.chart import Axis, Chart, Series, series_colour, stacked_bars
from ..drawing.chart_data import ChartData
from ..drawing.distributions import Quantity, cdf, histogram, largest_value
from ..drawing.formatting import cause_label, css_name, time_unit
from ..drawing.thinning import NUM_INTERVALS, average_over_time, counter, thin, thin_points
from ..ledger.causes import CAUSES, Cause
from ..ledger.predictions import prediction_error
from ..ledger.summary import variation

ChartsData = Mapping[str, ChartData]  # by label of the run


LATENCIES = {
    name: Quantity(name, title, label, counted)
    for name, title, label, counted in (
        ("ttft", "TTFT: time to first token", "time to first token", "requests"),
        ("itl", "TBT: time between tokens", "time between tokens", "tokens"),
        ("tpot", "TPOT: time per output token", "time per output token", "requests"),
        ("e2el", "End to end: arrival to last token", "arrival to last token", "requests"),
    )
}


def charts_of_run(run: ChartData) -> list[Chart]:
    """Return all charts of one run, in the page's order; some may be empty."""
    return [
        bubbles_by_stage(run),
        *charts_of_micro_batches(run),
        *([] if "requests" in run.unknown else latency_histograms(run)),
        predictions(run),
    ]


def charts_of_micro_batches(run: ChartData) -> list[Chart]:
    """Return the charts of requests and micro-batches, except for unknown quantities."""
    return [
        *([] if "requests" in run.unknown else [bubble_cdf({"all requests": run}), completions({"completed": run})]),
        stage_times(run),
        *([] if "tokens" in run.unknown else batch_composition({"": run})),
        *([] if "kv" in run.unknown else [kv_use(run)]),
        *([] if "queue" in run.unknown else [queue(run)]),
    ]


def _time_axis(label: str, end: float) -> tuple[Axis, float]:
    """Return a time axis from a run's start to `end` seconds, and the factor from seconds to its unit."""
    unit, factor = time_unit(end)
    return Axis(label, unit, 0.0, end * factor or 1.0), factor


def bubble_cdf(runs: ChartsData) -> Chart:
    """Build the CDF of the bubble time of a request (paper, Figure 12a)."""
    return cdf(
        Quantity(
            "bubble_time_per_request",
            "Bubble time of a request",
            "idle time before its micro-batches, all stages",
            "requests",
        ),
        {name: run.bubbles for name, run in runs.items()},
        note="Idle time right before its micro-batches, summed over them and the stages (paper, Figure 12a).",
    )


def completions(runs: ChartsData) -> Chart:
    """Build the chart of completed requests over time (paper, Figure 12b)."""
    end = max((max([run.span, *run.finished[-1:].tolist()]) for run in runs.values()), default=0.0)
    time, factor = _time_axis("time", end)
    series = []
    for number, (name, run) in enumerate(runs.items()):
        if len(run.finished):
            count = np.append(np.arange(len(run.finished) + 1.0), len(run.finished))
            x = np.concatenate([[0.0], run.finished, [max(run.span, float(run.finished[-1]))]])
            series.append(Series(name, *thin(x * factor, count), series_colour(number)))
    note = "Where a line ends, the run was over (paper, Figure 12b)." if len(runs) > 1 else "Paper, Figure 12b."
    title, counted = "Requests completed over time", Axis("requests completed", whole=True)
    return Chart("requests_completed", title, "steps", time, counted, tuple(series), note=note)


def stage_times(run: ChartData) -> Chart:
    """Build the histogram of compute times of micro-batches, by stage."""
    by_stage = enumerate(run.stage_seconds)
    seconds = {f"stage {stage}: cv {variation(values):.2f}": values for stage, values in by_stage}
    return histogram(_stage_time("Time of a micro-batch on each stage"), seconds)


def stage_time_cdf(runs: ChartsData) -> Chart:
    """Build the CDF of compute times of micro-batches, over all stages of a run together."""
    seconds = {name: np.concatenate([np.empty(0), *run.stage_seconds]) for name, run in runs.items()}
    note = "All stages together; even micro-batches make a steep line."
    return cdf(_stage_time("Time of a micro-batch on a stage"), seconds, note=note)


def _stage_time(title: str) -> Quantity:
    return Quantity("stage_times", title, "compute time of a micro-batch", "micro-batches")


def batch_composition(runs: ChartsData) -> list[Chart]:
    """Build one chart per run of the tokens in its micro-batches: prefill tokens stacked on decode tokens.

    All charts have the same time axis. Each has its own token axis.
    """
    time, factor = _time_axis("time of dispatch", max((run.span for run in runs.values()), default=0.0))
    several = len(runs) > 1
    charts = []
    for number, (name, run) in enumerate(runs.items()):
        edges, (decode, prefill), averaged = average_over_time(
            run.dispatched, [run.decode_tokens, run.prefill_tokens], run.span
        )
        x = edges * factor
        series = Series("decode tokens", x, decode, "decode"), Series("prefill tokens", x, prefill, "chunk")
        title = f"Tokens in a micro-batch{': ' + name if name else ''}"
        note = f"Means over 1/{len(decode)} of the run each." if averaged else "A step a micro-batch."
        note += " Mind the scale: each run has its own." if several else ""
        suffix, tokens = f"_{number}" if several else "", Axis("tokens", whole=True)
        charts.append(Chart(f"batch_composition{suffix}", title, "areas", time, tokens, series, note=note))
    return charts


def kv_use(run: ChartData) -> Chart:
    """Build the chart of KV blocks in use over time."""
    used = 100.0 * run.kv_blocks / run.num_blocks if run.num_blocks else np.empty(0)
    blocks = Axis("blocks in use", f"% of {run.num_blocks:,}")
    return _counters(run, "kv_use", "KV cache in use", blocks, [("", used, "kv")])


def queue(run: ChartData) -> Chart:
    """Build the chart of running and waiting requests over time."""
    counts = [("running", run.running, "s0"), ("waiting", run.waiting, "queue")]
    return _counters(run, "queue", "Requests running and waiting", Axis("requests", whole=True), counts)


def _counters(run: ChartData, name: str, title: str, y: Axis, counts: Sequence[tuple[str, Floats, str]]) -> Chart:
    """Build a chart of counters over time, each with its label, its values at the dispatches, and its colour."""
    time, factor = _time_axis("time", run.span)
    until = np.append(run.dispatched, run.span) * factor
    series = tuple(
        counter(label, until, np.append(values, values[-1]), colour) for label, values, colour in counts if len(values)
    )
    banded = any(s.band is not None for s in series)
    note = f"Means over 1/{NUM_INTERVALS} of the run each, in a band of lowest to highest." if banded else ""
    return Chart(name, title, "steps", time, y, series, note=note)


def latency_histograms(run: ChartData) -> list[Chart]:
    """Build the histograms of TTFT, TBT and end-to-end latency."""
    return [
        histogram(latency, {"": run.latencies[name]}, colours=["busy"])
        for name, latency in LATENCIES.items()
        if name != "tpot"
    ]


def latency_cdfs(runs: ChartsData) -> list[Chart]:
    """Build the CDFs of TTFT, TBT, TPOT and end-to-end latency."""
    return [
        cdf(latency, {label: run.latencies[name] for label, run in runs.items()}) for name, latency in LATENCIES.items()
    ]


def bubbles_by_stage(run: ChartData) -> Chart:
    """Build bars of idle time by cause, one per stage."""
    rows = {f"stage {stage}": seconds for stage, seconds in enumerate(run.by_cause)}
    return _cause_bars("bubbles_by_stage", "Idle time by stage and cause", rows, "idle time")


def bubbles_of_runs(runs: ChartsData) -> Chart:
    """Build bars of idle time by cause, summed over the stages, one per run."""
    rows = {name: run.cause_seconds for name, run in runs.items()}
    return _cause_bars("bubbles_by_cause", "Idle time by cause", rows, "idle time of all stages")


def _cause_bars(name: str, title: str, rows: Mapping[str, Mapping[Cause, float]], what: str) -> Chart:
    unit, factor = time_unit(max((sum(row.values()) for row in rows.values()), default=0.0))
    lengths = [
        (label, {cause_label(cause): seconds * factor for cause, seconds in row.items()}) for label, row in rows.items()
    ]
    colours = {cause_label(cause): css_name(cause) for cause in CAUSES}
    return stacked_bars(name, title, Axis(what, f"stage-{unit}"), lengths, colours)


def predictions(run: ChartData) -> Chart:
    """Build the scatter plot of predicted against measured times of micro-batches, with each stage's errors."""
    longest = largest_value([array for pair in run.predictions for array in pair])
    unit, factor = time_unit(longest)
    end = 1.06 * longest * factor
    series = []
    for stage, (predicted, measured) in enumerate(run.predictions):
        error = prediction_error([(predicted, measured)])
        if error is not None:
            x, y = thin_points(measured * factor, predicted * factor)
            text = f"stage {stage}: off by {percent_text(error['median'])} (p50), {percent_text(error['p90'])} (p90)"
            series.append(Series(text, x, y, series_colour(stage)))
    return Chart(
        "predictions",
        "Predicted and measured stage times",
        "scatter",
        Axis("measured", unit, 0.0, end),
        Axis("predicted", unit, 0.0, end),
        tuple(series),
        line=((0.0, 0.0), (end, end)),
        note="On the line the prediction was right.",
    )
