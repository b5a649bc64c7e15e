"""Reads exports of Nsight Systems: one for each rank, or with several ranks in it."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from ...conf.errors import ConfigError
from .nccl_payload import NcclCall
from .nsys_export import NsysExport, export_files
from .nsys_ranks import NsysRank, NvtxRange, launched_within, ranks_of
from .rank_trace import Engine, RankTrace, Step, Transfer, merged
from .step_names import step_of

_SECOND = 1e-9  # of a nanosecond
_SEND, _RECEIVE, _INIT = "ncclSend", "ncclRecv", "ncclCommInit"
_VLLM_FORWARD = "gpu_model_runner: forward"  # with VLLM_NVTX_SCOPES_FOR_PROFILING=1, vLLM 0.32
_MEGATRON_STEPS = {"Prefill": (), "Decode": (0, 0)}  # megatron-core 0.17, inference/engines/dynamic_engine.py
_OF_RANK = re.compile(r"rank[_\-.]?(\d+)", re.IGNORECASE)


@dataclass(slots=True)
class _Source:
    """A rank of an export, with what it is called and when its session began, in seconds of the folder's time."""

    rank: NsysRank
    name: str
    clock: str
    started: float
    numbers: dict[int, int] = field(default_factory=dict)  # in each communicator, its rank there

    def seconds(self, nanoseconds: int) -> float:
        return self.started + nanoseconds * _SECOND


def read_nsys(paths: Iterable[Path]) -> list[RankTrace]:
    """Read the exports of an engine's ranks: folders that hold them, or files. Times are seconds from the first
    session's start.

    Raises:
        ConfigError: no export, a report that is not exported yet, a damaged file, or no kernel in any.
    """
    sources: list[_Source] = []
    exports = [NsysExport(path) for path in export_files(paths)]
    begins = [export.started_ns for export in exports]
    first = min((begin for begin in begins if begin is not None), default=0)
    for export, began in zip(exports, begins, strict=True):
        found = ranks_of(export, _is_step)
        for rank in found:
            name = export.path.name if len(found) == 1 else f"{export.path.name} process {_pid(rank.process)}"
            started = 0.0 if began is None else (began - first) * _SECOND
            sources.append(_Source(rank, name, f"{export.host or 'host'} session of {export.path.name}", started))
        export.close()
    if not sources:
        raise ConfigError(f"{exports[0].path}: no kernel in it; record with nsys profile --trace cuda,nvtx")
    for source in sources:
        source.numbers = _numbers(source.rank)
    ranks = _job_ranks(sources)
    peers = _Peers(sources, ranks)
    traces = [_trace(source, rank, peers) for rank, source in zip(ranks, sources, strict=True)]
    return sorted(traces, key=lambda trace: trace.rank)


def _pid(process: int) -> int:
    return process >> 24 & 0xFFFFFF


def _numbers(rank: NsysRank) -> dict[int, int]:
    """The rank's number in each communicator that it has joined."""
    calls = [each.call for name, ranges in rank.calls.items() if name.startswith(_INIT) for each in ranges]
    return {call.communicator: call.rank for call in calls if call.communicator is not None and call.rank is not None}


def _job_ranks(sources: Sequence[_Source]) -> list[int]:
    """The number of each rank in the job: by the names of files, by a communicator of all of them, or as they come."""
    named = [_OF_RANK.search(source.name) for source in sources]
    numbers = [int(found[1]) for found in named if found is not None]
    if len(set(numbers)) == len(sources):
        return numbers
    for communicator, count in Counter(c for source in sources for c in source.numbers).items():
        if count == len(sources) > 1:
            numbers = [source.numbers[communicator] for source in sources]
            if len(set(numbers)) == len(sources):
                return numbers
    return list(range(len(sources)))


class _Peers:
    """Which rank of the job a peer is, that NCCL numbers within a communicator."""

    def __init__(self, sources: Sequence[_Source], ranks: Sequence[int]) -> None:
        self._known: dict[int, dict[int, int]] = defaultdict(dict)
        self._members: dict[int, set[int]] = defaultdict(set)
        self._num_ranks = len(sources)
        for source, rank in zip(sources, ranks, strict=True):
            for communicator, number in source.numbers.items():
                self._known[communicator][number] = rank
            for name in (_SEND, _RECEIVE):
                for each in source.rank.calls.get(name, []):
                    if each.call.communicator is not None:
                        self._members[each.call.communicator].add(rank)

    def of(self, call: NcclCall, own: int) -> int | None:
        if call.communicator is None or call.peer is None:
            return None
        known = self._known.get(call.communicator, {})
        if call.peer in known:
            return known[call.peer]
        others = self._members[call.communicator] - {own}
        if len(others) == 1:  # a communicator of two, whose begin was not recorded
            return next(iter(others))
        return call.peer if len(others) + 1 == self._num_ranks else None


def _trace(source: _Source, rank: int, peers: _Peers) -> RankTrace:
    computes, notes = source.rank.computes, []
    sends, receives = _transfers(source, rank, peers)
    if len(source.rank.point_to_point) and not sends and not receives:
        notes.append(
            f"{source.name}: no NVTX range says which of NCCL's kernels send and which receive; record with "
            "nsys profile --trace cuda,nvtx and NCCL 2.19 or later"
        )
    steps, engine = _steps(source)
    begins, ends = (source.started + edges.astype(np.float64) * _SECOND for edges in (computes.start, computes.end))
    return RankTrace(
        source.name, rank, tensor_rank=_tensor_rank(source), host=source.clock, engine=engine, steps=steps,
        computes=merged(begins, ends), sends=sends, receives=receives, notes=notes,
    )  # fmt: skip


def _steps(source: _Source) -> tuple[list[Step], Engine]:
    """The steps that NVTX ranges name, on the device: those that say what they held, where any does."""
    named = [(each, *step) for each in source.rank.ranges if (step := _step_of(each.text, 0.0, 0.0)) is not None]
    if any(step.has_tokens for _, step, _ in named):
        named = [found for found in named if found[1].has_tokens]
    ranges = _outermost([each for each, _, _ in named])
    steps = []
    for each, start, end in _device_times(ranges, source.rank):
        found = _step_of(each.text, source.seconds(start), source.seconds(end))
        assert found is not None
        steps.append(found[0])
    return steps, named[0][2] if named else "unknown engine"


def _tensor_rank(source: _Source) -> int:
    """The rank's number in the communicator with the most collectives, if that is not one of sends and receives."""
    pairwise = {each.call.communicator for name in (_SEND, _RECEIVE) for each in source.rank.calls.get(name, [])}
    collectives = Counter(
        each.call.communicator
        for name, ranges in source.rank.calls.items()
        if name in ("ncclAllReduce", "ncclAllGather", "ncclReduceScatter")
        for each in ranges
        if each.call.communicator not in pairwise
    )
    most = collectives.most_common(1)
    return source.numbers.get(most[0][0] or 0, 0) if most else 0


def _transfers(source: _Source, rank: int, peers: _Peers) -> tuple[list[Transfer], list[Transfer]]:
    """The sends and receives of a rank.

    NCCL's range is around the call; the kernel that does it is launched within, or, of a group of calls, at the group's
    end. So a call's kernel is the first one that its thread launches after the call began.
    """
    kernels = source.rank.point_to_point
    done: dict[str, list[Transfer]] = {_SEND: [], _RECEIVE: []}
    for thread in np.unique(kernels.thread):
        own = np.flatnonzero(kernels.thread == thread)
        own = own[np.argsort(kernels.launched[own], kind="stable")]
        for name, transfers in done.items():
            calls = [each for each in source.rank.calls.get(name, []) if each.thread == thread]
            places = np.searchsorted(kernels.launched[own], [each.start for each in calls])
            for each, place in zip(calls, places.tolist(), strict=True):
                if place < len(own):
                    kernel = own[place]
                    group = "" if each.call.communicator is None else f"{each.call.communicator:016x}"
                    start, end = source.seconds(int(kernels.start[kernel])), source.seconds(int(kernels.end[kernel]))
                    transfers.append(Transfer(start, end, peers.of(each.call, rank), each.call.bytes, group))
    sends, receives = (sorted(transfers, key=lambda transfer: transfer.start) for transfers in done.values())
    return sends, receives


@lru_cache(1024)
def _is_step(name: str) -> bool:
    return _step_of(name, 0.0, 0.0) is not None


def _step_of(name: str, start: float, end: float) -> tuple[Step, Engine] | None:
    """The step of a range; engines push some that they do not name in the torch profiler's traces."""
    if name == _VLLM_FORWARD:
        return Step(start, end, name), "vLLM"
    if name in _MEGATRON_STEPS:
        return Step(start, end, name, *_MEGATRON_STEPS[name]), "Megatron-LM"
    return step_of(name, start, end)


def _outermost(ranges: Sequence[NvtxRange]) -> list[NvtxRange]:
    """The ranges that lie within no other of their thread."""
    until: dict[int, int] = {}
    kept = []
    for each in ranges:
        if each.start >= until.get(each.thread, each.start):
            kept.append(each)
            until[each.thread] = each.end
    return kept


def _device_times(ranges: Sequence[NvtxRange], rank: NsysRank) -> list[tuple[NvtxRange, int, int]]:
    """Begin and end of each range on the device: of the kernels that it launched; on the host where it launched none.

    What the thread launches between two ranges (LM head, sampling) belongs to the one before.
    """
    ends = [after.start if after.thread == each.thread else each.end for each, after in pairwise(ranges)]
    wide = [replace(each, end=end) for each, end in zip(ranges, [*ends, np.iinfo(np.int64).max], strict=False)]
    kernels = rank.computes
    times = []
    for each, places in zip(ranges, launched_within(wide, kernels), strict=True):
        if len(places):
            times.append((each, int(kernels.start[places].min()), int(kernels.end[places].max())))
        else:
            times.append((each, each.start, each.end))
    return sorted(times, key=lambda step: step[1])
