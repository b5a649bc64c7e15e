"""A run folder in Python: its metrics, tables and figures."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....conf.errors import ConfigError, nearest
from ....conf.user_path import user_path
from ...core.numbers import percent_text, seconds_text
from ...core.run_record import RunRecord
from ..drawing.chart import Chart
from ..drawing.formatting import cause_label
from ..drawing.text_table import TextTable
from ..drawing.timeline_png import TimelineWindow
from ..explain.analysed_run import AnalysedRun
from ..explain.explain_json import read_explanation
from ..explain.explanation import Explanation
from ..ledger.blame import Blame
from ..ledger.causes import CAUSES
from ..ledger.fleet import Fleet
from ..ledger.ledger import Ledger
from ..report.run_charts import charts_of_run
from ..report.run_tables import main_numbers
from ..run_folder.read import RunFolder, read_run_folder
from ..run_folder.requests_csv import fleet_request_rows, request_rows
from ..run_folder.titles import is_simulated
from .table import Table, joined_tables, table_of_rows
from .tables import idle_of, micro_batches_of, spans_of, tokens_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TIMELINE = "timeline"


def read_run(folder: str | Path) -> Run:
    """Read a run folder, or the folder of a fleet of replicas.

    Raises:
        ConfigError: not a run folder, or its summary is damaged.
    """
    return Run(read_run_folder(user_path(folder)))


class Run:
    """A run, read from its folder by `read_run`. Large files are loaded lazily.

    Tables are `Table`s of numpy columns, named as in the folder's files. Times are seconds from the run's start;
    columns whose names end in `_ms` are in milliseconds. For a fleet, tables contain the rows of all replicas with a
    column `replica`, and times are from the fleet's start.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self._folder.path

    @property
    def title(self) -> str:
        """The title of the run's report; without one, the name of the folder."""
        return self._folder.title

    @property
    def summary(self) -> Mapping[str, Any]:
        """The contents of `summary.json`."""
        return self._folder.summary

    @property
    def config(self) -> Mapping[str, Any]:
        """The run's composed config; empty if it was not recorded."""
        return self._folder.config

    @cached_property
    def replicas(self) -> list[Run]:
        """The runs of a fleet, by number; for a standalone run, the run itself."""
        found = self._folder.replicas
        return [self] if found == [self._folder] else [Run(folder) for folder in found]

    @property
    def is_fleet(self) -> bool:
        """Whether it has several replicas."""
        return self.replicas != [self]

    @property
    def fleet(self) -> Fleet:
        """The ledgers of all replicas on one clock; a standalone run is a fleet of one.

        Raises:
            ConfigError: one of the files is damaged.
        """
        return self._analysed.fleet

    @property
    def record(self) -> RunRecord:
        """The record of the coordinator and the stages. Times are seconds from the run's start.

        Raises:
            ConfigError: it is a fleet, or one of the files is damaged.
        """
        self._check_alone("record")
        return self.fleet.records[0]

    @property
    def ledger(self) -> Ledger:
        """Every idle second of every stage, with its cause.

        Raises:
            ConfigError: it is a fleet, or one of the files is damaged.
        """
        self._check_alone("ledger")
        return self.fleet.ledgers[0]

    @property
    def explanation(self) -> Explanation | None:
        """The predicted effect of changes, from `gapless explain`; None if that was not run.

        Raises:
            ConfigError: `explain.json` is damaged.
        """
        return read_explanation(self.path)

    @property
    def words(self) -> list[str]:
        """What cost the run most, why, and what would change it: one sentence each."""
        return self._analysed.words

    @cached_property
    def requests(self) -> Table:
        """One row per request: the columns of `requests.csv`."""
        if self.is_fleet:
            return table_of_rows("requests", *fleet_request_rows(self.fleet))
        return table_of_rows("requests", *request_rows(self.record, self.ledger, self.blame))

    @property
    def blame(self) -> Blame:
        """How much TTFT and TBT each request added to others.

        Raises:
            ConfigError: it is a fleet, or one of the files is damaged.
        """
        self._check_alone("blame")
        return self._analysed.blame

    @cached_property
    def micro_batches(self) -> Table:
        """One row per micro-batch: dispatch and completion times, contents, bubble time."""
        return self._table([micro_batches_of(*part) for part in self._parts])

    @cached_property
    def spans(self) -> Table:
        """One row per micro-batch and stage: the columns of `spans.csv.gz`."""
        return self._table([spans_of(*part) for part in self._parts])

    @cached_property
    def idle(self) -> Table:
        """One row per idle interval of each stage, with its cause."""
        span = self.fleet.span_seconds
        return self._table([idle_of(record, ledger, start, start + span) for record, ledger, start in self._parts])

    @cached_property
    def tokens(self) -> Table:
        """One row per output token: its time, and the time since the previous token (`tbt_ms`)."""
        return self._table([tokens_of(record, start) for record, _, start in self._parts])

    @cached_property
    def figures(self) -> list[str]:
        """The names of the figures that `plot` draws."""
        return [TIMELINE, *self._charts]

    def plot(self, name: str = TIMELINE, window: tuple[float, float] | None = None) -> Figure:
        """Draw a chart of the report as a matplotlib figure.

        Args:
            name: one of `figures`.
            window: the timeline's start and end, in seconds from the run's start; by default some micro-batches whose
                idle time is like the whole run's.

        Raises:
            ConfigError: an unknown name, a window for a chart other than the timeline, or an empty window.
        """
        from .figures import chart_figure, timeline_figure

        if name == TIMELINE:
            if window is not None and not window[0] < window[1]:
                raise ConfigError(f"window={window}: must be its start, then its end, in seconds from the run's start")
            runs = zip(self.replicas, self.fleet.ledgers, strict=True)
            return timeline_figure({run.title: TimelineWindow.of(ledger, window) for run, ledger in runs})
        if window is not None:
            raise ConfigError(f"window: only the {TIMELINE} has one")
        if name not in self._charts:
            raise ConfigError(f"plot({name!r}): no such picture{nearest(name, self.figures)}")
        return chart_figure(self._charts[name])

    def __repr__(self) -> str:
        return f"{self.title} ({', '.join(f'{name.lower()} {value}' for name, value, _ in main_numbers(self.summary))})"

    def _repr_html_(self) -> str:
        """Return the title, main numbers, and idle time by cause, for notebooks."""
        numbers = TextTable(("", "", ""), list(main_numbers(self.summary)))
        seconds = self.summary["bubble_seconds"]
        share = self.summary["bubble_fraction"] / (sum(seconds.values()) or 1.0)
        causes = [
            (cause_label(cause), seconds_text(seconds[cause]), percent_text(share * seconds[cause]))
            for cause in sorted(CAUSES, key=lambda cause: -seconds.get(cause, 0.0))
            if seconds.get(cause, 0.0) > 0.0
        ]
        idle = TextTable(("idle because of", "stage-seconds", "of stage time"), causes)
        return f"<p><strong>{html.escape(self.title)}</strong></p>{numbers.html()}{idle.html()}"

    @cached_property
    def _analysed(self) -> AnalysedRun:
        return AnalysedRun.read(self._folder)

    @cached_property
    def _charts(self) -> dict[str, Chart]:
        """The charts that have data, by name."""
        charts, mark = charts_of_run(self._analysed.charts), ", simulated" if is_simulated(self.config) else ""
        return {chart.name: replace(chart, title=chart.title + mark) for chart in charts if not chart.is_empty}

    @property
    def _parts(self) -> list[tuple[RunRecord, Ledger, float]]:
        """The record and the ledger of each replica, and the fleet's start on its clock."""
        fleet = self.fleet
        parts = zip(fleet.records, fleet.ledgers, fleet.starts, strict=True)
        return [(record, ledger, ledger.t0 - start) for record, ledger, start in parts]

    def _table(self, tables: list[Table]) -> Table:
        return joined_tables(tables, "replica") if self.is_fleet else tables[0]

    def _check_alone(self, what: str) -> None:
        if self.is_fleet:
            raise ConfigError(f"{what}: {self.path} is of {len(self.replicas)} replicas; ask replicas[NUMBER].{what}")
