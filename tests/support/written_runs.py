"""Runs written into folders, as commands write them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gapless.runtime.analysis.explain.analysed_run import AnalysedRun
from gapless.runtime.analysis.ledger.fleet import Fleet
from gapless.runtime.analysis.report.write_folder import write_run_folder
from gapless.runtime.analysis.run_folder.read import RunFolder
from gapless.runtime.analysis.run_folder.run_info import RunInfo
from gapless.runtime.analysis.run_folder.write import write_run_data
from gapless.runtime.core.run_record import RunRecord


def analysed(run: RunRecord | Fleet, config: Mapping[str, Any], **info: Any) -> AnalysedRun:
    """Return a run analysed; `info` is what `RunInfo` takes beside the config."""
    return AnalysedRun(run if isinstance(run, Fleet) else Fleet([run]), RunInfo(config, **info))


def write_run(path: Path, run: RunRecord | Fleet, config: Mapping[str, Any], **info: Any) -> RunFolder:
    """Write a run's folder with its page."""
    return write_run_folder(path, analysed(run, config, **info))


def write_data(path: Path, record: RunRecord, config: Mapping[str, Any], **info: Any) -> RunFolder:
    """Write a run's folder without its page."""
    run = analysed(record, config, **info)
    write_run_data(path, run.summary, run.record, run.ledger, run.blame)
    return run.folder(path)
