"""The ranks of an Nsight Systems export: kernels, NVTX ranges and NCCL calls of each process and device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..core.micro_batch_columns import Ints
from .nccl_payload import NcclCall, NcclPayloads
from .nsys_export import NsysExport

_PROCESS = -16777216  # mask of a global thread id that leaves its process: the lower 24 bits are the thread
_RANGES = (59, 60)  # NvtxPushPopRange, NvtxStartEndRange
_DEVICE_TO_DEVICE = 8  # ENUM_CUDA_MEMCPY_OPER
_NO_LAUNCH = -1


@dataclass(frozen=True, slots=True)
class Kernels:
    """Kernels and copies on a device, an entry each, in order of their begin; times in nanoseconds of the session.

    `launched` is when the host launched it and `thread` the thread that did; -1 where the export does not say.
    """

    start: Ints
    end: Ints
    launched: Ints
    thread: Ints

    def __len__(self) -> int:
        return len(self.start)

    def of(self, chosen: npt.NDArray[np.bool_] | Ints) -> Kernels:
        return Kernels(self.start[chosen], self.end[chosen], self.launched[chosen], self.thread[chosen])


@dataclass(frozen=True, slots=True)
class NvtxRange:
    """A range that a thread pushed, in nanoseconds of the session."""

    start: int
    end: int
    thread: int
    text: str
    call: NcclCall


@dataclass(slots=True)
class NsysRank:
    """One process on one device.

    Attributes:
        process: its global id.
        computes: kernels and copies that compute.
        point_to_point: kernels of NCCL's sends and receives.
        collectives: NCCL's other kernels.
        ranges: NVTX ranges of the process by engines and users.
        calls: NCCL's ranges of the process, by name.
    """

    process: int
    device: int
    computes: Kernels
    point_to_point: Kernels
    collectives: Kernels
    ranges: list[NvtxRange] = field(default_factory=list)
    calls: dict[str, list[NvtxRange]] = field(default_factory=dict)


def ranks_of(export: NsysExport) -> list[NsysRank]:
    """The ranks of an export, by process and device. Those that ran no kernel are none."""
    kernels = _kernels(export)
    ranges = _ranges(export)
    ranks = []
    for (process, device), (table, names) in sorted(kernels.items()):
        is_nccl = np.array(["nccl" in name.lower() for name in names], bool)
        pairwise = is_nccl & np.array([_is_point_to_point(name) for name in names], bool)
        rank = NsysRank(process, device, table.of(~is_nccl), table.of(pairwise), table.of(is_nccl & ~pairwise))
        for each in ranges.get(process, []):
            if each.text.startswith("nccl"):
                rank.calls.setdefault(each.text, []).append(each)
            else:
                rank.ranges.append(each)
        ranks.append(rank)
    return ranks


def _is_point_to_point(name: str) -> bool:
    """Whether a kernel of NCCL sends or receives: ncclDevKernel_SendRecv, before NCCL 2.19 ncclKernel_SendRecv_..."""
    return "sendrecv" in name.lower().replace("_", "")


def _kernels(export: NsysExport) -> dict[tuple[int, int], tuple[Kernels, list[str]]]:
    """The device's work by (process, device), with the name of each kernel."""
    rows = []
    for table, name, where in (
        ("CUPTI_ACTIVITY_KIND_KERNEL", "shortName", "1"),
        ("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", None, "1"),  # graphs that nsys traced as a whole
        ("CUPTI_ACTIVITY_KIND_MEMCPY", None, f"k.copyKind = {_DEVICE_TO_DEVICE}"),
    ):
        if export.has(table, "start", "end"):
            rows += export.rows(_with_launches(export, table, name, where))
    by_rank: dict[tuple[int, int], list[tuple[int, int, int, int, str]]] = defaultdict(list)
    for start, end, process, device, launched, thread, name in rows:
        by_rank[process, device].append((start, end, launched, thread, name))
    found = {}
    for key, own in by_rank.items():
        own.sort()
        start, end, launched, thread = np.array([row[:4] for row in own], np.int64).T
        found[key] = Kernels(start, end, launched, thread), [row[4] for row in own]
    return found


def _with_launches(export: NsysExport, table: str, name: str | None, where: str) -> str:
    """The query of start, end, process, device, launch, launching thread and name; the process is the thread's where
    the table does not say it."""
    has_process = export.has(table, "globalPid")
    device = "IFNULL(k.deviceId, 0)" if export.has(table, "deviceId") else "0"
    text = f"(SELECT value FROM StringIds WHERE id = k.{name})" if name and export.has(table, name) else "''"
    runtime = "CUPTI_ACTIVITY_KIND_RUNTIME"
    if not export.has(table, "correlationId") or not export.has(runtime, "start", "correlationId", "globalTid"):
        process = "IFNULL(k.globalPid, 0)" if has_process else "0"
        columns = f'k.start, k."end", {process}, {device}, {_NO_LAUNCH}, {_NO_LAUNCH}, {text}'
        return f"SELECT {columns} FROM {table} k WHERE {where}"
    launcher = f"(r.globalTid & {_PROCESS})"
    process = f"COALESCE({'k.globalPid, ' if has_process else ''}{launcher}, 0)"
    launch = f"IFNULL(r.start, {_NO_LAUNCH}), IFNULL(r.globalTid, {_NO_LAUNCH})"
    return (
        f'SELECT k.start, k."end", {process}, {device}, {launch}, {text} FROM {table} k LEFT JOIN {runtime} r '
        f"ON r.correlationId = k.correlationId {f'AND {launcher} = k.globalPid' if has_process else ''} WHERE {where}"
    )


def _ranges(export: NsysExport) -> dict[int, list[NvtxRange]]:
    """The NVTX ranges of each process, in order of their begin."""
    table = "NVTX_EVENTS"
    if not export.has(table, "start", "end", "eventType", "globalTid"):
        return {}
    payloads = NcclPayloads(export)
    own = "n.text" if export.has(table, "text") else "NULL"
    registered = "(SELECT value FROM StringIds WHERE id = n.textId)" if export.has(table, "textId") else "NULL"
    data = "CAST(n.binaryData AS BLOB)" if export.has(table, "binaryData") else "NULL"
    rows = export.rows(
        f'SELECT n.start, n."end", n.globalTid, COALESCE({own}, {registered}, \'\'), {data} FROM {table} n '
        f'WHERE n.eventType IN {_RANGES} AND n."end" IS NOT NULL ORDER BY n.start'
    )
    by_process: dict[int, list[NvtxRange]] = defaultdict(list)
    for start, end, thread, text, payload in rows:
        call = payloads.read(payload) if text.startswith("nccl") else NcclCall()
        by_process[thread & _PROCESS].append(NvtxRange(start, end, thread, text, call))
    return by_process


def launched_within(ranges: Sequence[NvtxRange], kernels: Kernels) -> list[Ints]:
    """The places of the kernels that each range's thread launched between its begin and its end."""
    found = []
    by_thread: dict[int, tuple[Ints, Ints]] = {}
    for each in ranges:
        if each.thread not in by_thread:
            own = np.flatnonzero(kernels.thread == each.thread)
            own = own[np.argsort(kernels.launched[own], kind="stable")]
            by_thread[each.thread] = own, kernels.launched[own]
        own, launched = by_thread[each.thread]
        first, last = np.searchsorted(launched, [each.start, each.end])
        found.append(own[first:last])
    return found
