"""One rank's trace, independent of the file format: each importer produces `RankTrace`s."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from ...core.micro_batch_columns import Floats

Engine = Literal["vLLM", "SGLang", "Megatron-LM", "unknown engine"]


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass through a rank's layers, a micro-batch; times in seconds on the rank's clock.

    Counts are None if the trace does not record them. For a GPU, the times are device times if the trace has them.

    Attributes:
        start: when the rank started it.
        end: when the rank was done with it.
        label: the trace's own name for it.
        prefill_requests: prompts or chunks in it.
        prefill_tokens: tokens of those prompts and chunks.
        prefill_prefix: sum of the KV tokens before the chunks.
        decode_requests: requests that decode in it.
        decode_tokens: decode tokens; more than `decode_requests` if draft tokens are verified.
        decode_context: sum of the KV tokens that the decodes attend to.
    """

    start: float
    end: float
    label: str = ""
    prefill_requests: int | None = None
    prefill_tokens: int | None = None
    prefill_prefix: int | None = None
    decode_requests: int | None = None
    decode_tokens: int | None = None
    decode_context: int | None = None

    @property
    def has_tokens(self) -> bool:
        """Whether the trace records token counts."""
        return self.prefill_tokens is not None and self.decode_tokens is not None

    @property
    def is_empty(self) -> bool:
        """Whether the step has no tokens: to return finished requests, or a dummy run to keep ranks in step."""
        return self.prefill_tokens == 0 and self.decode_tokens == 0


@dataclass(frozen=True, slots=True)
class Transfer:
    """One send or one receive of a rank; times in seconds on its clock.

    `start`: the rank was ready for it (its kernel began, its call was entered). `end`: it was done on this rank. A
    receive that starts before its send includes the wait for the sender; matching both sides removes the wait.

    Attributes:
        peer: global rank of the other side; None if unknown.
        bytes: None if unknown.
        group: name of the process group. Transfers between two ranks are in order within a group.
    """

    start: float
    end: float
    peer: int | None = None
    bytes: int | None = None
    group: str = ""


T = TypeVar("T", Step, Transfer)


@dataclass(slots=True)
class RankTrace:
    """The trace of one rank. Times are seconds on its own clock, until `common_clock.py` puts them on a common one.

    Attributes:
        name: file name, for messages.
        rank: global rank.
        stage: pipeline stage; None if the trace does not specify it: then `pipeline_run.py` infers it.
        tensor_rank: tensor-parallel rank within the stage.
        host: name of the machine; ranks of one host share a clock. Empty if unknown.
        engine: the engine that wrote the trace.
        computes: [n, 2] begin and end of compute (device kernels, or CPU operators), merged: ascending and disjoint.
            Sends and receives are excluded.
        steps: in time order.
        sends: in time order.
        receives: in time order.
        notes: notes about this rank's trace for the report, one line each.
    """

    name: str
    rank: int
    stage: int | None = None
    tensor_rank: int = 0
    host: str = ""
    engine: Engine = "unknown engine"
    computes: Floats = field(default_factory=lambda: np.zeros((0, 2)))
    steps: list[Step] = field(default_factory=list)
    sends: list[Transfer] = field(default_factory=list)
    receives: list[Transfer] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def joined(parts: Sequence[RankTrace]) -> RankTrace:
    """Join the files of one rank, which share a clock, into one trace."""
    first, *others = parts
    if not others:
        return first
    return replace(
        first,
        computes=merged(*np.concatenate([part.computes for part in parts]).T),
        steps=sorted((step for part in parts for step in part.steps), key=lambda step: step.start),
        sends=sorted((each for part in parts for each in part.sends), key=lambda each: each.start),
        receives=sorted((each for part in parts for each in part.receives), key=lambda each: each.start),
        notes=[note for part in parts for note in part.notes],
    )


def with_times(found: Iterable[T], moved: Callable[[float], float]) -> list[T]:
    """Return copies of steps or transfers with their times mapped by `moved`."""
    return [replace(each, start=moved(each.start), end=moved(each.end)) for each in found]


def merged(start: Sequence[float] | Floats, end: Sequence[float] | Floats) -> Floats:
    """Return the union of intervals as [n, 2]: ascending and separate. Empty ones are dropped."""
    begins, ends = np.asarray(start, np.float64), np.asarray(end, np.float64)
    kept = ends > begins
    begins, ends = begins[kept], ends[kept]
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], np.maximum.accumulate(ends[order])
    is_new = np.ones(len(begins), bool)
    is_new[1:] = begins[1:] > ends[:-1]
    first = np.flatnonzero(is_new)
    last = np.append(first[1:], len(begins)) - 1 if len(first) else first
    return np.stack([begins[first], ends[last]], axis=1)


def without(intervals: Floats, holes: Floats) -> Floats:
    """Return `intervals` minus `holes`; arguments and result have the form of `merged`."""
    if not len(holes) or not len(intervals):
        return intervals
    edges = np.unique(np.concatenate([intervals.ravel(), holes.ravel()]))
    start, end = edges[:-1], edges[1:]
    kept = _covers(intervals, start) & ~_covers(holes, start)
    return merged(start[kept], end[kept])


def seconds_within(intervals: Floats, start: Floats, end: Floats) -> Floats:
    """Return the seconds of `intervals` (in the form of `merged`) in each [start, end)."""
    if not len(intervals):
        return np.zeros(len(start))
    begins, ends = intervals[:, 0], intervals[:, 1]
    until = np.concatenate([[0.0], np.cumsum(ends - begins)])

    def before(times: Floats) -> Floats:
        place = np.searchsorted(begins, times, side="right")
        over = np.where(place > 0, np.maximum(0.0, ends[np.maximum(place - 1, 0)] - times), 0.0)
        return until[place] - over

    return before(np.asarray(end)) - before(np.asarray(start))


def _covers(intervals: Floats, times: Floats) -> npt.NDArray[np.bool_]:
    place = np.searchsorted(intervals[:, 0], times, side="right") - 1
    covers: npt.NDArray[np.bool_] = (place >= 0) & (times < intervals[np.maximum(place, 0), 1])
    return covers
