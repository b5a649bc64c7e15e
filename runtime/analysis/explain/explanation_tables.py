"""An explanation on the terminal: the effects of changes, and notes on the search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from rich.table import Table
from rich.text import Text

from ...core.numbers import counted, ms_text, percent_text, seconds_text
from ..drawing.fitting_table import FittingTable
from .explanation import METRIC_NAMES, METRICS, Explanation, Interval

_NOTED_BEYOND = 0.05  # least share of compute time in sizes absent from the run for a row to be marked
_MOST_LISTED = 6
_LEAST_LABEL = 24  # least width of the change column, in characters


def error_line(explanation: Explanation) -> str:
    """Return one line on the error of the replay of the unchanged run."""
    errors = ", ".join(f"{METRIC_NAMES[metric]} {_off(explanation.error[metric])}" for metric in METRICS)
    part = ""
    if explanation.replayed < explanation.requests:
        part = f"; changes are replayed on the first {explanation.replayed:,} of {explanation.requests:,} requests"
    return f"replay of the unchanged run: {errors}{part}"


def values_line(explanation: Explanation) -> str:
    """Return one line with the run's own metrics."""
    run = explanation.run
    return (
        f"{seconds_text(run['duration'])}, p99 TBT {ms_text(run['p99_itl_ms'])}, "
        f"p99 TTFT {ms_text(run['p99_ttft_ms'])}; ranked by {METRIC_NAMES[explanation.metric]}"
    )


def changes_table(explanation: Explanation) -> FittingTable:
    """Build the table of changes: by metric the share saved, and its interval.

    If it does not fit, only the metric by which changes are ranked keeps its intervals.
    """
    caption = "share saved by the change, from simulated replays"
    if any(saves.low < saves.high for outcome in explanation.outcomes for saves in outcome.saves.values()):
        caption += ", in brackets its 90% interval over pairs of runs"
    if any(outcome.beyond > _NOTED_BEYOND for outcome in explanation.outcomes):
        caption += "\n* partly in micro-batch sizes absent from the run, whose times are less certain"
    if any(outcome.is_trade for outcome in explanation.outcomes):
        caption += "\n+ trade-off: another metric grows beyond the tolerance"
    outcomes, metric = explanation.outcomes, explanation.metric

    def table(*, ranges: bool) -> Table:
        title = "Predicted effect of changes"
        made = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
        made.add_column("change", overflow="fold", ratio=None)
        metrics = (metric, *(each for each in METRICS if each != metric))
        for each in metrics:
            made.add_column(METRIC_NAMES[each], justify="right", no_wrap=True)
        for outcome in outcomes:
            mark = " *" if outcome.beyond > _NOTED_BEYOND else ""
            mark += " +" if outcome.is_trade else ""
            cells = (saving_text(outcome.saves[each], whole=ranges or each == metric) for each in metrics)
            is_worth = outcome.saves[metric].low > 0 and outcome.overrides
            made.add_row(Text(outcome.change + mark), *cells, style="bold" if is_worth else "")
        return made

    longest = max((len(outcome.change) for outcome in outcomes), default=0)
    return FittingTable([partial(table, ranges=True), partial(table, ranges=False)], max(0, longest - _LEAST_LABEL))


def search_lines(explanation: Explanation) -> Iterator[str]:
    """Yield the number of changes tried, those skipped for lack of time, and those that do not fit, with the reason."""
    helped = "" if explanation.outcomes or explanation.left_changes else ", none of which saves anything"
    yield f"tried {counted(explanation.tried, 'change')}{helped}"
    if left := explanation.left_changes:
        yield f"not tried for lack of time (seconds): {', '.join(left[:_MOST_LISTED])}{_more(left)}"
    for label, why in list(explanation.refused.items())[:_MOST_LISTED]:
        yield f"not possible: {label} ({why})"


def _more(several: Sequence[str]) -> str:
    return f" and {len(several) - _MOST_LISTED} more" if len(several) > _MOST_LISTED else ""


def saving_text(saves: Interval, *, whole: bool = True) -> str:
    """Format a saving: `12.3% (10.1 to 14.0)`, or without the interval."""
    middle = percent_text(saves.middle) if abs(saves.middle) < 10 else f"{saves.middle * 100:,.0f}%"
    if not whole or saves.low == saves.high:
        return middle
    digits = 1 if max(abs(saves.low), abs(saves.high)) < 1 else 0
    return f"{middle} ({saves.low * 100:.{digits}f} to {saves.high * 100:.{digits}f})"


def _off(share: float) -> str:
    changed = percent_text(abs(share))
    return "the same" if changed == percent_text(0.0) else f"{changed} {'longer' if share > 0 else 'shorter'}"
