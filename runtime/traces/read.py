"""The formats of other engines' traces, each with its reader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from .iterations_of_steps import name_steps
from .kineto import read_kineto
from .log_run import run_of_log
from .pipeline_run import ImportedRun, run_of_traces
from .vllm_log import log_file, logs_in, read_iterations


def _kineto(paths: Sequence[Path]) -> ImportedRun:
    """Return the run of traces; of steps without token counts, vLLM's log in the same folders says them."""
    traces = read_kineto(paths)
    if not all(step.has_tokens for trace in traces for step in trace.steps):
        folders = [path for path in paths if path.is_dir()]
        if any(logs_in(folder) for folder in folders):
            notes = traces[0].notes
            notes += name_steps(traces, read_iterations(log_file(folders, notes), notes))
    return run_of_traces(traces)


READERS: dict[str, Callable[[Sequence[Path]], ImportedRun]] = {  # by `ReportConfig.import_`
    "kineto": _kineto,
    "vllm_log": run_of_log,
}
