"""Names the steps of a trace that says no token counts by the lines of vLLM's iteration log."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..core.micro_batch_columns import Floats
from .rank_trace import RankTrace, Step
from .vllm_log import Iteration, named

_FEW = 8  # steps: the lengths of fewer say too little
_CLEAR = 0.6  # of the second best, what the best place is off at most
_CLOSE = 0.5  # of a step, what it is off at most in the mean


def name_steps(traces: Sequence[RankTrace], iterations: Sequence[Iteration]) -> list[str]:
    """Give the steps of `traces` the make-up of their iterations, in place; a line about it for people.

    A trace covers a part of the log, and all ranks' traces the same part. Where the part lies is read off the last
    stage: its steps end as far apart as the engine waited for each of them.

    Args:
        traces: of the ranks of one engine. Those whose steps all have counts are left alone.
        iterations: the lines of its log.
    """
    bare = [trace for trace in traces if trace.steps and not all(step.has_tokens for step in trace.steps)]
    if not bare:
        return []
    counts = {len(trace.steps) for trace in bare}
    if len(counts) > 1:
        return [f"vLLM's log: ranks have {min(counts):,} to {max(counts):,} steps, so its iterations name none of them"]
    ends = [np.array([step.end for step in trace.steps]) for trace in bare]
    place = _place(iterations, max(ends, key=lambda end: float(end[-1])))
    if place is None:
        return [f"vLLM's log: its {len(iterations):,} iterations fit the {min(counts):,} steps of the trace nowhere"]
    for trace in bare:
        part = iterations[place : place + len(trace.steps)]
        trace.steps[:] = [_kept(step, iteration) for step, iteration in zip(trace.steps, part, strict=True)]
    first, last = iterations[place].index, iterations[place + len(ends[0]) - 1].index
    return [f"vLLM's log names the tokens of the steps: they are its iterations {first:,} to {last:,}"]


def _kept(step: Step, iteration: Iteration) -> Step:
    return step if step.has_tokens else named(step, iteration)


def _place(iterations: Sequence[Iteration], ends: Floats) -> int | None:
    """Return where among the iterations the first step lies, that ends at `ends[0]`; None where that is not clear."""
    places = len(iterations) - len(ends) + 1
    if places == 1:
        return 0
    if places < 1 or len(ends) < _FEW:
        return None
    elapsed = np.array([iteration.elapsed for iteration in iterations])
    apart = np.diff(ends)
    windows = np.lib.stride_tricks.sliding_window_view(elapsed[1:], len(apart))
    off = np.abs(windows - apart).mean(axis=1)
    best = int(off.argmin())
    others = np.delete(off, best)
    clear = off[best] <= _CLEAR * others.min() and off[best] <= _CLOSE * apart.mean()
    return best if clear else None
