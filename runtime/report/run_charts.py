"""The charts of runs. A chart of several runs takes their data by label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..core.micro_batch_columns import Floats
from ..ledger.causes import CAUSES, Cause
from ..ledger.predictions import prediction_error
from ..ledger.summary import variation
from .chart import Axis, Chart, Series, series_colour
from .chart_data import ChartData
from .distributions import cdf, histogram, largest_value
from .formatting import cause_label, css_name, percent_text, time_unit
from .thinning import NUM_INTERVALS, average_over_time, counter, thin, thin_points

ChartsData = Mapping[str, ChartData]  # by label of the run


class LatencyTexts(NamedTuple):
    """The texts of the charts of one latency: their title, the label of their time axis, and what is counted."""

    title: str
    quantity: str
    counted: str


LATENCIES = {
    "ttft": LatencyTexts("TTFT: time to first token", "time to first token", "requests"),
    "itl": LatencyTexts("TBT: time between tokens", "time between tokens", "tokens"),
    "tpot": LatencyTexts("TPOT: time per output token", "time per output token", "requests"),
    "e2el": LatencyTexts("End to end: arrival to last token", "arrival to last token", "requests"),
}


def charts_of_run(run: ChartData) -> list[Chart]:
    """Return all charts of one run, in the page's order."""
    return [
        bubbles_by_cause({f"stage {stage}": [stage] for stage in range(run.num_stages)}, run),
        *charts_of_micro_batches(run),
        *([] if "requests" in run.unknown else latency_histograms(run)),
        *([predictions(run)] if _has_predictions(run) else []),
    ]


def charts_of_micro_batches(run: ChartData) -> list[Chart]:
    """Return the charts of requests and micro-batches, but for those of what is unknown."""
    return [
        *([] if "requests" in run.unknown else [bubble_cdf({"all requests": run}), completions({"completed": run})]),
        stage_times(run),
        *([] if "tokens" in run.unknown else batch_composition({"": run})),
        *([] if "kv" in run.unknown else [kv_use(run)]),
        *([] if "queue" in run.unknown else [queue(run)]),
    ]


def colours(runs: ChartsData) -> list[str]:
    """Return a series colour for each run."""
    return [series_colour(number) for number in range(len(runs))]


def bubble_cdf(runs: ChartsData) -> Chart:
    """Make the cumulative distribution of the bubble time of a request (paper, Figure 12a)."""
    return cdf(
        "bubble_time_per_request", "Bubble time of a request", "idle time before its micro-batches, all stages",
        {name: run.bubbles for name, run in runs.items()}, colours(runs), counted="requests",
        note="Idle time right before its micro-batches, summed over them and the stages (paper, Figure 12a).",
    )  # fmt: skip


def completions(runs: ChartsData) -> Chart:
    """Make the chart of completed requests over time (paper, Figure 12b)."""
    end = max((max([run.span, *run.finished[-1:].tolist()]) for run in runs.values()), default=0.0)
    unit, factor = time_unit(end)
    series = []
    for (name, run), colour in zip(runs.items(), colours(runs), strict=True):
        if len(run.finished):
            count = np.arange(len(run.finished) + 2, dtype=np.float64)
            count[-1] = len(run.finished)
            x = np.concatenate([[0.0], run.finished, [max(run.span, float(run.finished[-1]))]])
            series.append(Series(name, *thin(x * factor, count), colour))
    note = "Where a line ends, the run was over (paper, Figure 12b)." if len(runs) > 1 else "Paper, Figure 12b."
    return Chart(
        "requests_completed", "Requests completed over time", "steps", Axis("time", unit, 0.0, end * factor or 1.0),
        Axis("requests completed", whole=True),
        tuple(series), note=note,
    )  # fmt: skip


def stage_times(run: ChartData) -> Chart:
    """Make the histogram of compute times of micro-batches, by stage."""
    seconds = {}
    for stage, values in enumerate(run.stage_seconds):
        seconds[f"stage {stage}: cv {variation(values):.2f}"] = values
    title = "Time of a micro-batch on each stage"
    return histogram(
        "stage_times", title, "compute time of a micro-batch", seconds,
        [series_colour(stage) for stage in range(len(seconds))], counted="micro-batches",
    )  # fmt: skip


def stage_time_cdf(runs: ChartsData) -> Chart:
    """Make the cumulative distribution of compute times of micro-batches, over all stages of a run together."""
    seconds = {
        name: np.concatenate(run.stage_seconds) if run.stage_seconds else np.empty(0) for name, run in runs.items()
    }
    return cdf(
        "stage_times", "Time of a micro-batch on a stage", "compute time of a micro-batch", seconds, colours(runs),
        counted="micro-batches", note="All stages together; even micro-batches make a steep line.",
    )  # fmt: skip


def batch_composition(runs: ChartsData) -> list[Chart]:
    """Make a chart per run of the tokens in its micro-batches: prefill tokens stacked on decode tokens.

    All charts have the same time axis. The axis of tokens is each run's own.
    """
    end = max((run.span for run in runs.values()), default=0.0)
    unit, factor = time_unit(end)
    time = Axis("time of dispatch", unit, 0.0, end * factor or 1.0)
    tokens = Axis("tokens", whole=True)
    several = len(runs) > 1
    charts = []
    for number, (name, run) in enumerate(runs.items()):
        edges, (decode, prefill), averaged = average_over_time(
            run.dispatched, [run.decode_tokens, run.prefill_tokens], run.span
        )
        series: tuple[Series, ...] = ()
        if len(run.dispatched):
            x = edges * factor
            series = (Series("decode tokens", x, decode, "decode"), Series("prefill tokens", x, prefill, "chunk"))
        title = f"Tokens in a micro-batch{': ' + name if name else ''}"
        note = f"Means over 1/{len(decode)} of the run each." if averaged else "A step a micro-batch."
        note += " Mind the scale: each run has its own." if several else ""
        suffix = f"_{number}" if several else ""
        charts.append(Chart(f"batch_composition{suffix}", title, "areas", time, tokens, series, note=note))
    return charts


def _until_end(run: ChartData, values: Floats, factor: float) -> tuple[Floats, Floats]:
    """Return the moments of dispatch times `factor`, and the values there; the last value is repeated at the end."""
    return np.append(run.dispatched, run.span) * factor, np.append(values, values[-1])


def kv_use(run: ChartData) -> Chart:
    """Make the chart of KV blocks in use over time."""
    unit, factor = time_unit(run.span)
    series: tuple[Series, ...] = ()
    if len(run.dispatched) and run.num_blocks:
        series = (counter("", *_until_end(run, 100.0 * run.kv_blocks / run.num_blocks, factor), "kv"),)
    return Chart(
        "kv_use", "KV cache in use", "steps", Axis("time", unit, 0.0, run.span * factor or 1.0),
        Axis("blocks in use", f"% of {run.num_blocks:,}"), series, note=_band_note(series),
    )  # fmt: skip


def queue(run: ChartData) -> Chart:
    """Make the chart of running and waiting requests over time."""
    unit, factor = time_unit(run.span)
    series = tuple(
        counter(name, *_until_end(run, values, factor), colour)
        for name, values, colour in (("running", run.running, "s0"), ("waiting", run.waiting, "queue"))
        if len(values)
    )
    return Chart(
        "queue", "Requests running and waiting", "steps", Axis("time", unit, 0.0, run.span * factor or 1.0),
        Axis("requests", whole=True), series, note=_band_note(series),
    )  # fmt: skip


def _band_note(series: Sequence[Series]) -> str:
    """Return the note of a chart whose series are averaged; empty if none is."""
    banded = any(s.band is not None for s in series)
    return f"Means over 1/{NUM_INTERVALS} of the run each, in a band of lowest to highest." if banded else ""


def latency_histograms(run: ChartData) -> list[Chart]:
    """Make histograms of TTFT, TBT and end-to-end latency."""
    return [
        histogram(name, texts.title, texts.quantity, {"": run.latencies[name]}, ["busy"], counted=texts.counted)
        for name, texts in LATENCIES.items()
        if name != "tpot"
    ]


def latency_cdfs(runs: ChartsData) -> list[Chart]:
    """Make the cumulative distributions of TTFT, TBT, TPOT and end-to-end latency."""
    charts = []
    for name, texts in LATENCIES.items():
        seconds = {label: run.latencies[name] for label, run in runs.items()}
        charts.append(cdf(name, texts.title, texts.quantity, seconds, colours(runs), counted=texts.counted))
    return charts


def bubbles_by_cause(rows: Mapping[str, Sequence[int]], run: ChartData) -> Chart:
    """Make bars of idle time by cause, one for each entry of `rows`: its label and the stages that it sums."""
    seconds = [
        {cause: sum((run.by_cause[stage][cause] for stage in stages), 0.0) for cause in CAUSES}
        for stages in rows.values()
    ]
    return _cause_bars("bubbles_by_stage", "Idle time by stage and cause", list(rows), seconds, "idle time")


def bubbles_of_runs(runs: ChartsData) -> Chart:
    """Make bars of idle time by cause, summed over the stages, one for each run."""
    seconds = [run.cause_seconds for run in runs.values()]
    return _cause_bars("bubbles_by_cause", "Idle time by cause", list(runs), seconds, "idle time of all stages")


def _cause_bars(name: str, title: str, rows: list[str], seconds: Sequence[Mapping[Cause, float]], what: str) -> Chart:
    unit, factor = time_unit(max((sum(row.values()) for row in seconds), default=0.0))
    places = np.arange(len(rows), dtype=np.float64)
    series = tuple(
        Series(cause_label(cause), places, np.array([row[cause] for row in seconds]) * factor, css_name(cause))
        for cause in CAUSES
        if any(row[cause] > 0 for row in seconds)
    )
    return Chart(name, title, "bars", Axis(what, f"stage-{unit}"), Axis(""), series, categories=tuple(rows))


def _has_predictions(run: ChartData) -> bool:
    return any(len(measured) for _, measured in run.predictions)


def predictions(run: ChartData) -> Chart:
    """Make the scatter of predicted against measured times of micro-batches. The legend has each stage's errors."""
    unit, factor = time_unit(largest_value([array for pair in run.predictions for array in pair]))
    series = []
    for stage, (predicted, measured) in enumerate(run.predictions):
        error = prediction_error([(predicted, measured)])
        if error is not None:
            x, y = thin_points(measured * factor, predicted * factor)
            text = f"stage {stage}: off by {percent_text(error['median'])} (p50), {percent_text(error['p90'])} (p90)"
            series.append(Series(text, x, y, series_colour(stage)))
    return Chart(
        "predictions", "Predicted and measured stage times", "scatter", Axis("measured", unit),
        Axis("predicted", unit), tuple(series), diagonal=True, note="On the line the prediction was right.",
    )  # fmt: skip
