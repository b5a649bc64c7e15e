"""Reads the torch profiler's (Kineto's) Chrome traces: one file for each rank of an engine."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ...conf.errors import ConfigError
from .chrome_trace import ChromeTrace
from .rank_trace import Engine, RankTrace, Step, Transfer, merged, with_times, without
from .step_names import step_of

_SUFFIXES = (".json", ".json.gz")
_DEVICE = ("kernel",)
_SEND_RECEIVE = re.compile(r"nccl(Dev)?Kernel_?(Generic_)?SendRecv", re.IGNORECASE)  # both directions have one kernel
_CPU_TRANSFER = re.compile(r"(?:gloo|mpi|ucc):(send|recv)\b|_C::shm_(send|recv)_tensor_list")
_NCCL_RANGE = re.compile(r"nccl:(send) \d+->(\d+)|nccl:(recv) \d+<-(\d+)")
_OTHER_COMMUNICATION = re.compile(r"c10d::(send|recv)|record_param_comms|gloo:|nccl:")
_BACKWARD = "autograd::engine::evaluate_function"
_VLLM_PROCESS = re.compile(r"Worker(?:_DP(\d+))?(?:_PP(\d+))?(?:_TP(\d+))?")
_FILE_NUMBERS = {
    "pp": re.compile(r"(?:^|[-_.])pp-?(\d+)", re.IGNORECASE),
    "tp": re.compile(r"(?:^|[-_.])tp-?(\d+)", re.IGNORECASE),
    "dp": re.compile(r"(?:^|[-_.])dp-?(\d+)", re.IGNORECASE),
    "rank": re.compile(r"(?:^|[-_.])rank[-_]?(\d+)", re.IGNORECASE),
}
_BYTES_OF_TYPES = {
    8: "double float64 long int64",
    4: "float float32 int int32",
    2: "half float16 bfloat16 short",
    1: "byte char uint8 int8 bool",
}
_BYTES = {name: size for size, names in _BYTES_OF_TYPES.items() for name in names.split()}

Direction = Literal["send", "recv"]


def read_kineto(paths: Iterable[Path]) -> list[RankTrace]:
    """Read the traces of an engine's ranks: folders that hold them, or files (.json or .json.gz).

    Times are seconds since the first event of all. Events are read one by one; of each some numbers are kept.

    Raises:
        ConfigError: no trace there, one that is damaged or no trace of inference, or two of one rank.
    """
    files = trace_files(paths)
    read = [_File.of(path) for path in files]
    ranked = [file for file in read if file.is_rank]
    if not ranked:
        raise ConfigError(f"{files[0]}: no trace of a rank: neither kernels nor operators in it")
    for number, file in enumerate(ranked):
        if file.rank is None:
            file.rank = number
    by_rank: dict[int, _File] = {}
    for file in ranked:
        assert file.rank is not None
        if file.rank in by_rank:
            raise ConfigError(
                f"{by_rank[file.rank].path.name} and {file.path.name} are both of rank {file.rank}: keep the traces of "
                "one recording"
            )
        by_rank[file.rank] = file
    replica = min(file.replica for file in ranked)
    own = [by_rank[rank] for rank in sorted(by_rank) if by_rank[rank].replica == replica]
    origin = min(file.base_ns for file in own)
    last = max((file.stage or 0 for file in own), default=0)
    traces = [file.trace(origin, last) for file in own]
    if len(own) < len(ranked):
        traces[0].notes.append(f"{len(ranked) - len(own)} ranks of other data-parallel replicas are left out.")
    if skipped := [file.path.name for file in read if not file.is_rank]:
        traces[0].notes.append(f"Left out, as it is not a rank's: {', '.join(skipped)}.")
    return traces


def trace_files(paths: Iterable[Path]) -> list[Path]:
    """Return the trace files that `paths` are or hold.

    Raises:
        ConfigError: there is none.
    """
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path}: no such file or folder")
        inside = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.name.endswith(_SUFFIXES))
        if not inside:
            raise ConfigError(f"{path}: holds no trace, which is a .json or .json.gz file")
        found += inside
    return found


@dataclass(slots=True)
class _File:
    """What is kept of one file. Times are microseconds from `base_ns`, in nanoseconds."""

    path: Path
    base_ns: int = 0
    rank: int | None = None
    stage: int | None = None
    tensor_rank: int = 0
    replica: int = 0
    host: str = ""
    has_rank: bool = False  # the file says that it is a rank's
    engine: Engine = "unknown engine"
    kernels: tuple[array[float], array[float]] = field(default_factory=lambda: (array("d"), array("d")))
    operators: dict[Any, tuple[array[float], array[float]]] = field(default_factory=dict)  # by thread
    steps: dict[str, list[tuple[Step, Any]]] = field(default_factory=dict)  # by category; with their thread
    transfers: list[tuple[Direction | None, Transfer]] = field(default_factory=list)  # NCCL kernels
    ranges: list[tuple[Direction, Transfer]] = field(default_factory=list)  # NCCL's annotations on the device
    cpu_transfers: list[tuple[Direction, Transfer]] = field(default_factory=list)

    @classmethod
    def of(cls, path: Path) -> _File:
        file, trace = cls(path), ChromeTrace(path)
        first: float | None = None
        for event in trace.events():
            try:
                if event.get("ph") == "X":
                    if first is None:
                        first = float(int(event["ts"]))
                    file._take(event, float(event["ts"]) - first, float(event.get("dur", 0.0)))
                elif event.get("ph") == "M" and event.get("name") == "process_name":
                    file._take_process(str(event.get("args", {}).get("name", "")))
            except ConfigError:
                raise
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ConfigError(f"{path}: damaged, or not the torch profiler's ({error!r} in an event)") from error
        file._take_metadata(trace.metadata, first or 0.0)
        return file

    @property
    def is_rank(self) -> bool:
        return bool(self.kernels[0]) or (bool(self.operators) and (self.has_rank or bool(self.steps)))

    def _take_metadata(self, metadata: dict[str, Any], first: float) -> None:
        self.base_ns = int(metadata.get("baseTimeNanoseconds") or 0) + int(first) * 1000
        self.host = str(metadata.get("host_name") or metadata.get("hostname") or "")
        if "vllm_version" in metadata:
            self.engine = "vLLM"
        info = metadata.get("distributedInfo")
        if isinstance(info, dict) and isinstance(info.get("rank"), int):
            self.rank, self.has_rank = info["rank"], True
        numbers = {name: int(found[1]) for name, p in _FILE_NUMBERS.items() if (found := p.search(self.path.name))}
        self.rank = numbers.get("rank") if self.rank is None else self.rank
        self.stage = numbers.get("pp") if self.stage is None else self.stage
        self.tensor_rank = self.tensor_rank or numbers.get("tp", 0)
        self.replica = self.replica or numbers.get("dp", 0)

    def _take_process(self, name: str) -> None:
        if "VLLM::Worker" in name and (found := _VLLM_PROCESS.search(name)):
            replica, stage, tensor_rank = (found[1], found[2], found[3])
            self.engine, self.has_rank = "vLLM", True
            self.replica, self.tensor_rank = int(replica or 0), int(tensor_rank or 0)
            self.stage = self.stage if stage is None else int(stage)

    def _take(self, event: dict[str, Any], start: float, seconds: float) -> None:
        category, name, end = event.get("cat"), event["name"], start + seconds
        if category in _DEVICE:
            if _SEND_RECEIVE.match(name):
                self.transfers.append(_nccl_transfer(event.get("args") or {}, start, end))
            else:
                self.kernels[0].append(start)
                self.kernels[1].append(end)
        elif category == "cpu_op":
            if found := _CPU_TRANSFER.match(name):
                self.cpu_transfers.append((_direction(found[1] or found[2]), Transfer(start, end)))
            elif name.startswith(_BACKWARD):
                raise ConfigError(f"{self.path}: a trace of training, it has backward passes; only inference is read")
            elif not _OTHER_COMMUNICATION.match(name):
                starts, ends = self.operators.setdefault(event.get("tid"), (array("d"), array("d")))
                starts.append(start)
                ends.append(end)
        elif category in ("user_annotation", "gpu_user_annotation"):
            if named := step_of(name, start, end):
                step, engine = named
                self.steps.setdefault(category, []).append((step, event.get("tid")))
                self.engine = engine if self.engine == "unknown engine" else self.engine
            elif category == "gpu_user_annotation" and (nccl := _NCCL_RANGE.match(name)):
                direction, peer = (nccl[1], nccl[2]) if nccl[1] else (nccl[3], nccl[4])
                self.ranges.append((_direction(direction), Transfer(start, end, int(peer))))
            elif category == "user_annotation" and (gloo := _CPU_TRANSFER.match(name)):
                self.cpu_transfers.append((_direction(gloo[1] or gloo[2]), Transfer(start, end)))

    def trace(self, origin_ns: int, last_stage: int) -> RankTrace:
        """Return the rank's trace, in seconds from `origin_ns`."""
        on_device = bool(self.kernels[0])
        notes = []
        steps = self._steps("gpu_user_annotation" if on_device else "user_annotation")
        if not steps:
            notes.append(
                f"The traces name no steps{' on the device' if on_device else ''}: micro-batches are told apart by "
                "sends and receives, and what they held is unknown."
            )
        if on_device:
            computes = merged(*self.kernels)
            transfers = self._directed(steps, last_stage)
        else:
            threads = {thread for _, thread in self.steps.get("user_annotation", [])} & set(self.operators)
            used = [self.operators[thread] for thread in threads] or list(self.operators.values())
            starts, ends = (np.concatenate([columns[i] for columns in used]) for i in range(2))
            inside = [step for step in steps if not step.is_empty]
            computes = merged(
                np.concatenate([starts, [step.start for step in inside]]),
                np.concatenate([ends, [step.end for step in inside]]),
            )
            if steps:  # what an empty step does is no compute
                computes = without(computes, merged(*_edges(step for step in steps if step.is_empty)))
            transfers = self.cpu_transfers
        assert self.rank is not None
        shift = (self.base_ns - origin_ns) / 1e9

        def seconds(time: float) -> float:
            return time / 1e6 + shift

        def of_direction(wanted: Direction) -> list[Transfer]:
            found = with_times((transfer for direction, transfer in transfers if direction == wanted), seconds)
            return sorted(found, key=lambda transfer: (transfer.start, transfer.end))

        return RankTrace(
            self.path.name,
            self.rank,
            self.stage,
            self.tensor_rank,
            self.host,
            self.engine,
            computes=computes / 1e6 + shift,
            steps=with_times(steps, seconds),
            sends=of_direction("send"),
            receives=of_direction("recv"),
            notes=notes,
        )

    def _steps(self, category: str) -> list[Step]:
        """Return the steps in order of time: those that say what they held, where any does; none inside another.

        A device has an annotation on each stream that it used: together they are one step.
        """
        steps = [step for step, _ in self.steps.get(category, [])]
        if any(step.has_tokens for step in steps):
            steps = [step for step in steps if step.has_tokens or step.label.startswith("step[")]
        kept: list[Step] = []
        for step in sorted(steps, key=lambda step: (step.start, -step.end)):
            if not kept or step.start >= kept[-1].end:
                kept.append(step)
            elif step.label == kept[-1].label:
                kept[-1] = replace(kept[-1], end=max(kept[-1].end, step.end))
            elif step.end > kept[-1].end:
                kept.append(step)
        return kept

    def _directed(self, steps: Sequence[Step], last_stage: int) -> list[tuple[Direction, Transfer]]:
        """Return NCCL's sends and receives, each with its direction.

        It is the kernel's own, that of the range around it, or, where the engine calls NCCL past torch, told by its
        place: the first stage sends, the last receives, and one between receives before a step and sends after it.
        """
        known: list[tuple[Direction, Transfer]] = []
        ranges = sorted(self.ranges, key=lambda found: found[1].start)
        starts = np.array([found.start for _, found in ranges])
        for direction, transfer in self.transfers:
            if direction is None and len(ranges):
                place = int(np.searchsorted(starts, transfer.start, side="right")) - 1
                if place >= 0 and transfer.start <= ranges[place][1].end:
                    direction = ranges[place][0]
                    transfer = replace(transfer, peer=ranges[place][1].peer)
            if direction is None and self.stage is not None and last_stage:
                if self.stage in (0, last_stage):
                    direction = "send" if self.stage == 0 else "recv"
                else:
                    direction = _by_place(transfer, steps)
            if direction is not None:
                known.append((direction, transfer))
        if not self.transfers:
            known = list(ranges)
        return known


def _direction(word: str) -> Direction:
    return "send" if word == "send" else "recv"


def _by_place(transfer: Transfer, steps: Sequence[Step]) -> Direction | None:
    """Tell a direction by its place: receives come before a step that is near, sends after one."""
    if not steps:
        return None
    since = min((transfer.start - step.end for step in steps if step.end <= transfer.start), default=np.inf)
    until = min((step.start - transfer.end for step in steps if step.start >= transfer.end), default=np.inf)
    return "recv" if until < since else "send"


def _nccl_transfer(arguments: dict[str, Any], start: float, end: float) -> tuple[Direction | None, Transfer]:
    name = str(arguments.get("Collective name", ""))
    direction: Direction | None = "send" if name == "send" else "recv" if name.startswith("recv") else None
    peer = arguments.get("Dst Rank" if direction == "send" else "Src Rank") if direction else None
    elements = arguments.get("In msg nelems") or arguments.get("Out msg nelems")
    size = _BYTES.get(str(arguments.get("dtype", "")).lower())
    return direction, Transfer(
        start,
        end,
        peer if isinstance(peer, int) else None,
        elements * size if size and isinstance(elements, int) else None,
        str(arguments.get("Process Group Name", "")),
    )


def _edges(steps: Iterable[Step]) -> tuple[list[float], list[float]]:
    listed = list(steps)
    return [step.start for step in listed], [step.end for step in listed]
