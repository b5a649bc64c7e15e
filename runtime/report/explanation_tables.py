"""An explanation on the terminal: what would change a run, and what is worth knowing beside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ..ledger.advice import Interval
from ..ledger.explanation import METRICS, Explanation, Outcome
from .formatting import ms_text, percent_text, seconds_text

METRIC_NAMES = {"duration": "duration", "p99_itl_ms": "p99 TBT", "p99_ttft_ms": "p99 TTFT"}
_NOTED_BEYOND = 0.05  # share of compute time in sizes that the run has not shown from which on a row is marked
_LEAST_LABEL = 24  # columns of a change's text


def error_line(explanation: Explanation) -> str:
    """Say in one line how far the replay of the run as it was is off."""
    errors = ", ".join(f"{METRIC_NAMES[metric]} {_signed(explanation.error[metric])}" for metric in METRICS)
    part = ""
    if explanation.replayed < explanation.requests:
        part = f"; changes are replayed on the first {explanation.replayed:,} of {explanation.requests:,} requests"
    return f"replayed as it was, the run is off by: {errors}{part}"


def values_line(explanation: Explanation) -> str:
    """Say in one line what the run came to."""
    run = explanation.run
    return (
        f"{seconds_text(run['duration'])}, p99 TBT {ms_text(run['p99_itl_ms'])}, "
        f"p99 TTFT {ms_text(run['p99_ttft_ms'])}; ranked by {METRIC_NAMES[explanation.metric]}"
    )


def changes_table(explanation: Explanation) -> RenderableType:
    """Make the table of changes that keys make: by metric the share saved, and its range."""
    caption = "share that the change saves"
    if any(saves.low < saves.high for outcome in explanation.outcomes for saves in outcome.saves.values()):
        caption += ", in brackets in nine of ten pairs of runs"
    if any(outcome.beyond > _NOTED_BEYOND for outcome in explanation.outcomes):
        caption += "\n* partly in micro-batches of sizes that the run has not shown, whose times are less certain"
    if any(outcome.is_trade for outcome in explanation.outcomes):
        caption += "\n+ a trade: another metric gets longer than is tolerated (tolerance)"
    return _Outcomes("What would change it", explanation.outcomes, explanation.metric, caption)


def hypotheticals_table(explanation: Explanation) -> RenderableType:
    """Make the table of what no key makes."""
    return _Outcomes("What no key changes", explanation.hypotheticals, explanation.metric, "")


def worse_line(explanation: Explanation) -> str:
    """Write the changes that would not help, each with what it costs; empty where there is none."""
    metric = explanation.metric
    listed = [f"{each.change} ({_signed(-each.saves[metric].middle)})" for each in explanation.worse]
    return f"would not help ({METRIC_NAMES[metric]}): {', '.join(listed)}" if listed else ""


def saving_text(saves: Interval, *, whole: bool = True) -> str:
    """Write a saving: `12.3% (10.1 to 14.0)`, or without the range."""
    middle = percent_text(saves.middle) if abs(saves.middle) < 10 else f"{saves.middle * 100:,.0f}%"
    if not whole or saves.low == saves.high:
        return middle
    digits = 1 if max(abs(saves.low), abs(saves.high)) < 1 else 0
    return f"{middle} ({saves.low * 100:.{digits}f} to {saves.high * 100:.{digits}f})"


@dataclass(frozen=True, slots=True)
class _Outcomes:
    """A table of outcomes that fits the console: the ranges of the metrics beside the first are left out first."""

    title: str
    outcomes: Sequence[Outcome]
    metric: str
    caption: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        tables = [self._table(ranges=True), self._table(ranges=False)]
        wide = options.update(max_width=10_000)
        longest = max((len(outcome.change) for outcome in self.outcomes), default=0)
        spare = max(0, longest - _LEAST_LABEL)  # columns that the changes' text gives up where it is wrapped
        fits = Measurement.get(console, wide, tables[0]).maximum - spare <= options.max_width
        yield tables[0] if fits else tables[1]

    def _table(self, *, ranges: bool) -> Table:
        table = Table(title=self.title, title_justify="left", caption=self.caption or None, caption_justify="left")
        table.add_column("change", overflow="fold", ratio=None)
        metrics = (self.metric, *(metric for metric in METRICS if metric != self.metric))
        for metric in metrics:
            table.add_column(METRIC_NAMES[metric], justify="right", no_wrap=True)
        for outcome in self.outcomes:
            mark = " *" if outcome.beyond > _NOTED_BEYOND else ""
            mark += " +" if outcome.is_trade else ""
            cells = (saving_text(outcome.saves[metric], whole=ranges or metric == self.metric) for metric in metrics)
            is_worth = outcome.saves[self.metric].low > 0 and outcome.overrides
            table.add_row(Text(outcome.change + mark), *cells, style="bold" if is_worth else "")
        return table


def _signed(share: float) -> str:
    return f"{share * 100:+.1f}%"
