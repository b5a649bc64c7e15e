"""`gapless report import=FORMAT`: converts traces of another engine to a run folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..conf.errors import ConfigError
from ..conf.schema import ReportConfig
from ..conf.user_path import user_path
from ..runtime.core.numbers import counted, seconds_text
from .output_path import check_folder

if TYPE_CHECKING:
    from ..runtime.analysis.run_folder.read import RunFolder
    from ..runtime.analysis.traces.pipeline_run import ImportedRun

NEW_FOLDER = "imported"


def read(config: ReportConfig) -> ImportedRun:
    """Read the traces in `config.runs`, folders or files.

    Raises:
        ConfigError: no traces, a damaged or unknown one, or `out` cannot be a folder.
    """
    from ..runtime.analysis.traces.kineto import read_kineto
    from ..runtime.analysis.traces.pipeline_run import run_of_traces

    assert config.import_ is not None
    if not config.runs:
        raise ConfigError(f"runs: give the trace folder, as in gapless report import={config.import_} TRACES")
    check_folder(_destination(config), "out")
    return run_of_traces(read_kineto([user_path(text) for text in config.runs]))


def write(config: ReportConfig, run: ImportedRun) -> RunFolder:
    """Write the run folder, `out` or `imported` next to the traces, without the report."""
    from ..runtime.analysis.explain.analysed_run import AnalysedRun
    from ..runtime.analysis.run_folder.run_info import RunInfo
    from ..runtime.analysis.run_folder.write import write_run_data

    path = _destination(config)
    named = "" if run.engine == "unknown engine" else f"{run.engine}: "
    title = f"{named}{_name(config)}, imported from torch profiler traces"
    names = [Path(text).name for text in config.runs]
    settings = {"import": {"format": config.import_, "engine": run.engine, "traces": names}}
    analysed = AnalysedRun.of(run.record, RunInfo(settings, title=title))
    write_run_data(path, analysed.summary, analysed.record, analysed.ledger, analysed.blame)
    return analysed.folder(path)


def said(summary: Mapping[str, Any]) -> str:
    """Return a one-line summary of an imported run."""
    count, duration = summary["micro_batches"], summary["duration"]
    line = f"{counted(count, 'micro-batch')} in {seconds_text(duration)}"
    if (mean := summary.get("mean_tokens_per_micro_batch")) is None:
        return line
    tokens = round(mean * count)
    return f"{line}: {counted(tokens, 'token')} computed, prompts included, {tokens / (duration or 1.0):.1f} tok/s"


def _destination(config: ReportConfig) -> Path:
    if config.out is not None:
        return user_path(config.out, "out")
    first = user_path(config.runs[0])
    return (first if first.is_dir() else first.parent) / NEW_FOLDER


def _name(config: ReportConfig) -> str:
    first = user_path(config.runs[0]).resolve()
    return (first if first.is_dir() else first.parent).name
