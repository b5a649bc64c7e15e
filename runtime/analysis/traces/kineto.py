"""Reads Chrome traces of the torch profiler (Kineto): one file per rank of an engine."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from ....conf.errors import ConfigError
from .chrome_trace import ChromeTrace, NoTraceError
from .nccl import Direction, ProcessGroups, Range, kind_of, transfer_of
from .rank_trace import Engine, RankTrace, Step, Transfer, joined, merged, with_times, without
from .step_names import step_of

_SUFFIXES = (".json", ".json.gz")
_COMPARED = 64  # events compared to detect that one file contains another's
_CPU_TRANSFER = re.compile(r"(?:gloo|mpi|ucc):(send|recv)\b|_C::shm_(send|recv)_tensor_list")
_OTHER_COMMUNICATION = re.compile(r"c10d::(send|recv)|record_param_comms|gloo:|nccl:")
_BACKWARD = "autograd::engine::evaluate_function"
_VLLM_PROCESS = re.compile(r"Worker(?:_DP(\d+))?(?:_PP(\d+))?(?:_TP(\d+))?")
_PHASE = re.compile(r"[-_](EXTEND|PREFILL|DECODE)(?=[-_.])", re.IGNORECASE)
_FILE_NUMBERS = {
    "pp": re.compile(r"(?:^|[-_.])pp-?(\d+)", re.IGNORECASE),
    "tp": re.compile(r"(?:^|[-_.])tp-?(\d+)", re.IGNORECASE),
    "dp": re.compile(r"(?:^|[-_.])dp-?(\d+)", re.IGNORECASE),
    "rank": re.compile(r"(?:^|[-_.])rank[-_]?(\d+)", re.IGNORECASE),
}


def read_kineto(paths: Iterable[Path]) -> list[RankTrace]:
    """Read the traces of an engine's ranks from files (.json or .json.gz) or folders of them.

    Times are seconds since the earliest start of the files. Events are streamed to save memory.

    A rank's files per phase, as written by SGLang's `profile_by_stage`, are joined.

    Raises:
        ConfigError: no trace there, a damaged trace, a training trace, or two traces of one rank.
    """
    read = _read(paths)
    others = [file for file in read if not file.is_rank]
    ranks = [file for file in read if file.is_rank]
    of_several = [f for f in ranks if f.is_merged or sum(f.includes(other) for other in ranks) > 1]
    ranked = [file for file in ranks if file not in of_several]
    if not ranks:
        raise ConfigError(f"{read[0].path}: not a rank's trace: it has neither kernels nor operators")
    if not ranked:
        raise ConfigError(f"{ranks[0].path}: contains events of several ranks; give one file per rank")
    by_rank: dict[str, dict[str, _File]] = {}  # its files by phase
    for file in ranked:
        numbers = ", ".join(f"{name} {value}" for name, value in file.numbers.items()) or str(file.path)
        where = numbers if file.rank is None else f"rank {file.rank}"
        phases = by_rank.setdefault(where, {})
        other = phases.get(file.phase) or (next(iter(phases.values()), None) if "" in (file.phase, *phases) else None)
        if other is not None:
            raise ConfigError(
                f"{other.path.name} and {file.path.name} are both traces of {where}; keep those of one recording"
            )
        phases[file.phase] = file
        file.rank = list(by_rank).index(where) if file.rank is None else file.rank
    replica = min(file.replica for file in ranked)
    own = sorted((file for file in ranked if file.replica == replica), key=lambda file: file.rank or 0)
    origin = min(file.base_ns for file in own)
    last = max((file.stage or 0 for file in own), default=0)
    traces = [joined(list(parts)) for _, parts in groupby((f.trace(origin, last) for f in own), key=lambda t: t.rank)]
    if len(own) < len(ranked):
        traces[0].notes.append(f"{len(ranked) - len(own)} ranks of other data-parallel replicas are left out.")
    for why, files in (("not a rank's trace", others), ("events of several ranks", of_several)):
        if files:
            traces[0].notes.append(f"Left out ({why}): {', '.join(sorted(file.path.name for file in files))}.")
    return traces


def _read(paths: Iterable[Path]) -> list[_File]:
    """Read each file. A file found in a folder that is not a trace becomes an empty `_File`."""
    given = list(paths)
    read, foreign = [], []
    for path in trace_files(given):
        try:
            read.append(_File.of(path))
        except NoTraceError as error:
            foreign.append((_File(path), error))
    for file, why in foreign:
        if file.path in given or not read:
            raise why
    return [*read, *(file for file, _ in foreign)]


def trace_files(paths: Iterable[Path]) -> list[Path]:
    """Return the trace files among `paths` and in their folders.

    Raises:
        ConfigError: there is none.
    """
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path}: no such file or folder")
        files = [path] if path.is_file() else sorted(path.iterdir())
        inside = [file for file in files if file is path or file.name.lower().endswith(_SUFFIXES)]
        if not inside:
            raise ConfigError(f"{path}: contains no trace (.json or .json.gz)")
        found += inside
    return found


@dataclass(slots=True, eq=False)
class _File:
    """The data kept from one file. Times are microseconds since `base_ns` (nanoseconds)."""

    path: Path
    base_ns: int = 0
    rank: int | None = None
    stage: int | None = None
    tensor_rank: int = 0
    replica: int = 0
    host: str = ""
    has_rank: bool = False  # the file identifies itself as a rank's
    engine: Engine = "unknown engine"
    kernels: tuple[array[float], array[float]] = field(default_factory=lambda: (array("d"), array("d")))
    operators: dict[Any, tuple[array[float], array[float]]] = field(default_factory=dict)  # by thread
    steps: dict[str, list[tuple[Step, Any]]] = field(default_factory=dict)  # by category; with their thread
    transfers: list[tuple[Direction | None, Transfer]] = field(default_factory=list)  # NCCL kernels
    unnamed: list[tuple[str, Transfer]] = field(default_factory=list)  # NCCL kernels whose operation is unknown
    ranges: list[Range] = field(default_factory=list)  # NCCL's annotations on the device
    groups: ProcessGroups = field(default_factory=ProcessGroups)
    processes: dict[str, set[str]] = field(default_factory=dict)  # by category: processes or devices of its events
    numbers: dict[str, int] = field(default_factory=dict)  # ranks in the file's name
    cpu_transfers: list[tuple[Direction, Transfer]] = field(default_factory=list)

    @classmethod
    def of(cls, path: Path) -> _File:
        file, trace = cls(path), ChromeTrace(path)
        first: float | None = None
        for event in trace.events():
            try:
                if event.get("ph") == "X":
                    if first is None:
                        first = float(int(float(event["ts"])))
                    file._take(event, float(event["ts"]) - first, float(event.get("dur", 0.0)))
                elif event.get("ph") == "M" and event.get("name") == "process_name":
                    file._take_process(str(event.get("args", {}).get("name", "")))
            except ConfigError:
                raise
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ConfigError(f"{path}: damaged, or not a torch profiler trace ({error!r} in an event)") from error
        file._take_metadata(trace.metadata, first or 0.0)
        return file

    @property
    def is_rank(self) -> bool:
        return bool(self.kernels[0]) or (bool(self.operators) and (self.has_rank or bool(self.steps)))

    @property
    def is_merged(self) -> bool:
        """Whether it contains events of several ranks: of several devices, or of several CPU processes."""
        return len(self.processes.get("kernel" if self.kernels[0] else "cpu_op", ())) > 1

    @property
    def _times_ns(self) -> list[int]:
        starts = self.kernels[0] or next((starts for starts, _ in self.operators.values()), self.kernels[0])
        return [self.base_ns + round(start * 1e3) for start in starts]

    @property
    def phase(self) -> str:
        """The phase in the file name, from SGLang's `profile_by_stage`: such as `EXTEND` or `DECODE`; empty: all."""
        return found[1].upper() if (found := _PHASE.search(self.path.name)) else ""

    def includes(self, other: _File) -> bool:
        """Return whether it starts with the other file's first events and is longer, like a merged file."""
        if len(self.kernels[0]) <= len(other.kernels[0]):
            return False
        return set(other._times_ns[:_COMPARED]) <= set(self._times_ns)

    def _take_metadata(self, metadata: dict[str, Any], first: float) -> None:
        self.base_ns = int(metadata.get("baseTimeNanoseconds") or 0) + int(first) * 1000
        self.host = str(metadata.get("host_name") or metadata.get("hostname") or "")
        if "vllm_version" in metadata:
            self.engine = "vLLM"
        info = metadata.get("distributedInfo")
        if isinstance(info, dict) and isinstance(info.get("rank"), int):
            self.rank, self.has_rank = info["rank"], True
            self.groups.add_config(info.get("pg_config"))
        numbers = {name: int(found[1]) for name, p in _FILE_NUMBERS.items() if (found := p.search(self.path.name))}
        self.numbers = numbers
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
        if not math.isfinite(end):
            raise ValueError(f"its times are {start} and {seconds}")
        if category in ("kernel", "cpu_op"):
            self.processes.setdefault(category, set()).add(str(event.get("pid")))
        if category == "kernel":
            arguments = event.get("args") or {}
            kind = kind_of(name, arguments)
            if kind != "compute":
                direction, transfer = transfer_of(arguments, start, end)
                self.groups.add(transfer.group, arguments.get("Process Group Ranks"))
                if kind == "unknown":
                    self.unnamed.append((name, transfer))
                else:
                    self.transfers.append((direction, transfer))
            else:
                self.kernels[0].append(start)
                self.kernels[1].append(end)
        elif category == "cpu_op":
            if found := _CPU_TRANSFER.match(name):
                self.cpu_transfers.append((_direction(found[1] or found[2]), Transfer(start, end)))
            elif name.startswith(_BACKWARD):
                raise ConfigError(
                    f"{self.path}: a training trace (it has backward passes); only inference is supported"
                )
            elif not _OTHER_COMMUNICATION.match(name):
                starts, ends = self.operators.setdefault(event.get("tid"), (array("d"), array("d")))
                starts.append(start)
                ends.append(end)
        elif category in ("user_annotation", "gpu_user_annotation"):
            if named := step_of(name, start, end):
                step, engine = named
                self.steps.setdefault(category, []).append((step, event.get("tid")))
                self.engine = engine if self.engine == "unknown engine" else self.engine
            elif category == "gpu_user_annotation" and (nccl := Range.of(name, start, end)):
                self.ranges.append(nccl)
            elif category == "user_annotation" and (gloo := _CPU_TRANSFER.match(name)):
                self.cpu_transfers.append((_direction(gloo[1] or gloo[2]), Transfer(start, end)))

    def trace(self, origin_ns: int, last_stage: int) -> RankTrace:
        """Return the rank's trace, in seconds from `origin_ns`."""
        on_device = bool(self.kernels[0])
        notes = []
        steps = self._steps("gpu_user_annotation" if on_device else "user_annotation")
        if not steps:
            notes.append(
                f"The traces have no step annotations{' on the device' if on_device else ''}: micro-batches are "
                "inferred from sends and receives, and their token counts are unknown."
            )
        if on_device:
            transfers = self._directed(steps, last_stage, notes)
            computes = merged(*self.kernels)
        else:
            threads = {thread for _, thread in self.steps.get("user_annotation", [])} & set(self.operators)
            used = [self.operators[thread] for thread in threads] or list(self.operators.values())
            starts, ends = (np.concatenate([columns[i] for columns in used]) for i in range(2))
            inside = [step for step in steps if not step.is_empty]
            computes = merged(
                np.concatenate([starts, [step.start for step in inside]]),
                np.concatenate([ends, [step.end for step in inside]]),
            )
            if steps:  # operators in empty steps do not count as compute
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
        """Return the outermost steps in time order; if any has token counts, only those, and SGLang's `step[...]`.

        A device has one annotation per stream used: together they are one step.
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

    def _directed(self, steps: Sequence[Step], last_stage: int, notes: list[str]) -> list[tuple[Direction, Transfer]]:
        """Return NCCL's sends and receives, each with its direction.

        The direction is the kernel's own, else the enclosing range's. If the engine calls NCCL without torch, it is
        inferred from the stage: the first stage sends, the last one receives, and other stages receive before a step
        and send after it. A kernel whose operation is unknown becomes compute. `notes` get a line per kind of loss.
        """
        assert self.rank is not None
        known: list[tuple[Direction, Transfer]] = []
        ranges = sorted(self.ranges, key=lambda found: found.start)
        starts = np.array([found.start for found in ranges])
        unsaid: dict[str, float] = {}  # microseconds by how they are counted
        kernels = [*(("", *found) for found in self.transfers), *((name, None, found) for name, found in self.unnamed)]
        for name, direction, transfer in kernels:
            place = int(np.searchsorted(starts, transfer.start, side="right")) - 1
            around = ranges[place] if place >= 0 and transfer.start <= ranges[place].end else None
            if around is not None and around.direction is not None and direction is None:
                direction = around.direction
                transfer = replace(transfer, peer=self.groups.peer(around, transfer.group, self.rank))
            if name and direction is None:
                self.kernels[0].append(transfer.start)
                self.kernels[1].append(transfer.end)
                if around is not None:
                    continue
            elif direction is None and self.stage is not None and last_stage:
                if self.stage in (0, last_stage):
                    direction = "send" if self.stage == 0 else "recv"
                else:
                    direction = _by_place(transfer, steps)
            if direction is not None:
                known.append((direction, transfer))
            else:
                kernel = name.partition("(")[0]
                what = f"{kernel} (send, receive or all-reduce) count as compute" if name else "transfers are left out"
                unsaid[what] = unsaid.get(what, 0.0) + transfer.end - transfer.start
        for what, took in unsaid.items():
            notes.append(f"{self.path.name}: {took / 1e6:.3f} s of {what}: the trace does not record the operation.")
        if not kernels:
            for found in ranges:
                if found.direction is not None:
                    peer = self.groups.peer(found, "", self.rank)
                    known.append((found.direction, Transfer(found.start, found.end, peer)))
        return known


def _direction(word: str) -> Direction:
    return "send" if word == "send" else "recv"


def _by_place(transfer: Transfer, steps: Sequence[Step]) -> Direction | None:
    """Infer a direction from the nearest step: receives come before it, sends after it."""
    if not steps:
        return None
    since = min((transfer.start - step.end for step in steps if step.end <= transfer.start), default=np.inf)
    until = min((step.start - transfer.end for step in steps if step.start >= transfer.end), default=np.inf)
    return "recv" if until < since else "send"


def _edges(steps: Iterable[Step]) -> tuple[list[float], list[float]]:
    listed = list(steps)
    return [step.start for step in listed], [step.end for step in listed]
