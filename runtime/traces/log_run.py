"""A run from vLLM's iteration log alone: one lane, the engine's view."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from ..core.run_record import RunRecord, Wait
from .pipeline_run import ImportedRun, run_of_traces
from .rank_trace import RankTrace, Step, merged
from .vllm_log import iteration_times, log_file, named, read_iterations


def run_of_log(paths: Sequence[Path]) -> ImportedRun:
    """Make a run of the log that `paths` are or hold. The engine counts as busy while it waits for an iteration.

    Raises:
        ConfigError: no log there has iterations.
    """
    left_out: list[str] = []
    path = log_file(paths, left_out)
    iterations = read_iterations(path, left_out)
    begin, end, off = iteration_times(iterations)
    steps = [
        named(Step(start, until), iteration)
        for iteration, start, until in zip(iterations, begin.tolist(), end.tolist(), strict=True)
    ]
    notes = [
        f"{path.name}: the engine's view of {len(iterations):,} iterations. It counts as busy while it waits for a "
        "result; what each stage did meanwhile only a trace of the ranks says.",
        f"{path.name}: iterations are as long as the log says; where they lie, and the idle time in all, may be off by "
        f"{off * 1e3:.0f} ms.",
        *left_out,
    ]
    trace = RankTrace(path.name, 0, 0, engine="vLLM", computes=merged(begin, end), steps=steps, notes=notes)
    run = run_of_traces([trace])
    doubted = _doubt(run.record, off)
    run.record.notes = list(notes)
    if doubted:
        run.record.notes.append(
            f"{doubted:.3f} s of idle time lie near iterations of prompts alone: the engine may have had no request."
        )
    return run


def _doubt(record: RunRecord, off: float) -> float:
    """Name the gaps `unknown` near which there were prompts only: what seems control may be the time before they came.

    Args:
        record: of the log, whose waits are changed.
        off: seconds by which the record's times may be off.

    Returns:
        The seconds of these gaps.
    """
    doubted = 0.0
    lone = np.array([m.dispatched for m in record.micro_batches if m.decode_tokens == 0])
    for (before, _), (span, batch) in pairwise(zip(record.spans, record.micro_batches, strict=True)):
        if span.begin > before.end and len(lone) and float(np.abs(lone - span.begin).min()) <= off:
            batch.waits = [Wait(before.end, span.begin, "unknown")]
            doubted += span.begin - before.end
    return doubted
