"""A run or a fleet with all its analyses, computed once for its folder, its page, the terminal and notebooks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ....conf.errors import ConfigError
from ....conf.workloads import SloConfig
from ...core.run_record import RunRecord
from ..drawing.chart_data import ChartData, fleet_chart_data
from ..ledger.blame import Blame
from ..ledger.fleet import Fleet
from ..ledger.ledger import Ledger
from ..ledger.moments import Moment, worst_moments
from ..ledger.summary import summarize
from ..run_folder.read import RunFolder, load_fleet
from ..run_folder.run_info import RunInfo
from ..run_folder.titles import is_simulated, title_of
from . import cause_words
from .explain_json import read_explanation
from .explanation import Explanation
from .run_words import RunWords
from .sized_cause import SizedCause
from .span_replay import replayed_spans

Explain = Callable[["AnalysedRun"], Explanation | None]


@dataclass(frozen=True)
class AnalysedRun:
    """A run or a fleet, analysed. Costly results are computed lazily and cached.

    Attributes:
        fleet: the records and ledgers of its replicas; a standalone run is a fleet of one.
        info: config, SLO and title of the run.
        explain: explains the run by replays; by default returns None, so that there is no advice.
        origin: the folder it was read from; None for a run that has just ended.
    """

    fleet: Fleet
    info: RunInfo
    explain: Explain = lambda run: None
    origin: RunFolder | None = None

    @classmethod
    def of(cls, record: RunRecord, info: RunInfo, explain: Explain = lambda run: None) -> AnalysedRun:
        """Return the analysis of one pipeline's run."""
        return cls(Fleet([record]), info, explain)

    @classmethod
    def read(cls, folder: RunFolder, slo: SloConfig | None = None) -> AnalysedRun:
        """Read the folder of a run or fleet. Its advice is read from `explain.json`, if that is readable.

        Raises:
            ConfigError: one of the other files is damaged.
        """

        def explain(run: AnalysedRun) -> Explanation | None:
            with suppress(ConfigError):
                return read_explanation(folder.path)
            return None

        fleet = load_fleet(folder)
        fleet.check()
        return cls(fleet, RunInfo(folder.config, slo=slo), explain, origin=folder)

    @property
    def record(self) -> RunRecord:
        """The record of a standalone run."""
        assert not self.fleet.is_several
        return self.fleet.records[0]

    @property
    def ledger(self) -> Ledger:
        """The ledger of a standalone run."""
        assert not self.fleet.is_several
        return self.fleet.ledgers[0]

    @property
    def knows_requests(self) -> bool:
        """Whether the record has requests; traces from other engines may have none."""
        return all("requests" not in record.unknown for record in self.fleet.records)

    @cached_property
    def replicas(self) -> list[AnalysedRun]:
        """The run of each replica, without advice; for a standalone run, the run itself."""
        if not self.fleet.is_several:
            return [self]
        if self.origin is not None:
            folders = zip(self.origin.replicas, self.fleet.replicas, strict=True)
            return [AnalysedRun(replica, RunInfo(folder.config), origin=folder) for folder, replica in folders]
        title = title_of(self.info.config)
        return [
            AnalysedRun(replica, replace(self.info, title=f"{title}, {self.fleet.replica_name(number)}"))
            for number, replica in enumerate(self.fleet.replicas)
        ]

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The content of `summary.json`."""
        numbers = summarize(self.fleet, self.info.slo)
        if self.origin is not None:
            return self.origin.summary | numbers
        summary = self.info.summary(numbers)
        summary["causes"] = [each.summary for each in self.causes]
        if self.fleet.is_several and not is_simulated(self.info.config):  # simulated titles already name the replicas
            summary["title"] += f", {len(self.fleet.records)} replicas"
        return summary

    @property
    def title(self) -> str:
        """The title of its page."""
        return str(self.summary["title"]) if self.origin is None else self.origin.title

    @cached_property
    def blame(self) -> Blame:
        """How much TTFT and TBT each request of a standalone run costs the others."""
        return Blame.of_run(self.record, self.ledger)

    @cached_property
    def moments(self) -> list[Moment]:
        """The moments of a standalone run with the latest tokens."""
        return worst_moments(self.ledger, self.blame.intervals, self.blame)

    @cached_property
    def charts(self) -> ChartData:
        """The data of its charts; for a fleet, of all replicas together."""
        return fleet_chart_data(self.fleet)

    @cached_property
    def explanation(self) -> Explanation | None:
        """The predicted effects of changes of its setting; None if nothing was replayed."""
        return self.explain(self)

    @cached_property
    def causes(self) -> tuple[SizedCause, ...]:
        """The cost of each cause worth fixing, largest first.

        Computed by replays of the run's twin if it was explained, else by replays of its recorded spans; for a fleet,
        of the replica that ends last.
        """
        found = self.explanation
        if found is not None and (found.causes or not found.left):
            return found.causes
        fleet, layers = self.fleet, RunWords(self.info.config).layers
        if not fleet.is_several:
            return tuple(replayed_spans(self.record, self.ledger, layers, fleet.stragglers[0]))
        ends = [start + ledger.span_seconds for start, ledger in zip(fleet.starts, fleet.ledgers, strict=True)]
        last = ends.index(max(ends))
        layers = None if fleet.num_prefill else layers  # prefill and decode pools may split their layers differently
        of_last = replayed_spans(*fleet.parts[last], layers, fleet.stragglers[last])
        return tuple(replace(each, where=fleet.replica_name(last)) for each in of_last)

    @cached_property
    def words(self) -> list[str]:
        """Sentences on what costs the run most, what fixes it, and how certain this is."""
        found, fleet = self.explanation, self.fleet
        running = [each.num_running for record in fleet.records for each in record.micro_batches]
        whole = fleet.stage_seconds
        if not running or whole <= 0:
            return ["There were no requests."] if whole > 0 else []
        return cause_words.sentences(
            self.causes,
            {cause: seconds / whole for cause, seconds in fleet.seconds_by_cause().items()},
            metric="duration" if found is None else found.metric,
            value=fleet.span_seconds if found is None else found.value,
            error=None if found is None else found.error[found.metric],
            left=() if found is None else found.left,
            about=RunWords(self.info.config),
            running=sum(running) / len(running),
            is_ours=not any(record.unknown for record in fleet.records),
        )

    def folder(self, path: Path) -> RunFolder:
        """Return its folder at `path`, with the in-memory records."""
        return RunFolder(path, self.summary, self.fleet)
