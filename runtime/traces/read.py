"""The formats of other engines' traces, each with its reader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from .kineto import read_kineto
from .pipeline_run import ImportedRun, run_of_traces


def _kineto(paths: Sequence[Path]) -> ImportedRun:
    return run_of_traces(read_kineto(paths))


READERS: dict[str, Callable[[Sequence[Path]], ImportedRun]] = {"kineto": _kineto}  # by `ReportConfig.import_`
