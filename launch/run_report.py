"""The report of a run that `gapless generate` or `chat` ends with, where the room that analyses runs is installed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ..conf.build import to_mapping
from ..conf.schema import EngineConfig
from .advising import quick_advice
from .installed import has_analysis
from .progress import print_words, throughput, versions
from .results import show_one, show_words

if TYPE_CHECKING:
    from ..runtime.core.run_record import RunRecord

_log = logging.getLogger(__name__)


class RunReport:
    """Analyses the record of a run.

    Attributes:
        bubbles: the share of stage time that was idle so far.
    """

    def __init__(self, record: RunRecord, config: EngineConfig) -> None:
        from ..runtime.analysis.ledger.live_bubbles import LiveBubbles
        from ..runtime.analysis.run_folder.run_info import RunInfo

        self._record = record
        self._info = RunInfo(to_mapping(config), versions())
        self.bubbles = LiveBubbles(record)

    def write(self, run_dir: Path) -> None:
        """Write the run folder."""
        from ..runtime.analysis.explain.analysed_run import AnalysedRun
        from ..runtime.analysis.report.write_folder import write_run_folder

        write_run_folder(run_dir, AnalysedRun.of(self._record, self._info))

    def show(self, console: Console, run_dir: Path, *files: tuple[str, Path]) -> None:
        """Print what the run was like, with advice; write the run folder; print the paths of its files."""
        from ..runtime.analysis.explain.analysed_run import AnalysedRun
        from ..runtime.analysis.report.write_folder import write_run_folder

        analysed = AnalysedRun.of(self._record, self._info, quick_advice)
        try:
            print_words(console, Text(throughput(analysed.summary), "bold"))
            show_words(console, analysed.words)
        finally:
            write_run_folder(run_dir, analysed)
        show_one(console, run_dir, analysed, *files)


def make_report(record: RunRecord, config: EngineConfig) -> RunReport | None:
    """Create the report of a started run; None, and a message, if runs cannot be analysed here."""
    if not has_analysis():
        _log.info("there will be no report: gapless.runtime.analysis is not installed")
        return None
    return RunReport(record, config)
