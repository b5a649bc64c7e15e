"""The ranks of an Nsight Systems export: kernels, NVTX ranges and NCCL calls of each process and device."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
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
_COMPUTE, _PAIRWISE, _COLLECTIVE = range(3)


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


def ranks_of(export: NsysExport, is_wanted: Callable[[str], bool]) -> list[NsysRank]:
    """The ranks of an export, by process and device. Those that ran no kernel are none.

    Args:
        is_wanted: whether to keep the NVTX ranges of this text; NCCL's are kept anyway.
    """
    kernels = _kernels(export)
    ranges = _ranges(export, is_wanted)
    ranks = []
    for (process, device), (table, kind) in sorted(kernels.items()):
        computes, pairwise, collectives = (table.of(kind == each) for each in (_COMPUTE, _PAIRWISE, _COLLECTIVE))
        rank = NsysRank(process, device, computes, pairwise, collectives)
        for each in ranges.get(process, []):
            if each.text.startswith("nccl"):
                rank.calls.setdefault(each.text, []).append(each)
            else:
                rank.ranges.append(each)
        ranks.append(rank)
    return ranks


def _kind(name: str) -> int:
    """What a kernel of NCCL does; ncclDevKernel_SendRecv (before 2.19 ncclKernel_SendRecv_...) sends and receives."""
    return _PAIRWISE if "sendrecv" in name.lower().replace("_", "") else _COLLECTIVE


def _kernels(export: NsysExport) -> dict[tuple[int, int], tuple[Kernels, Ints]]:
    """The device's work by (process, device), with the kind of each kernel. Rows are read one by one."""
    nccl = export.rows("SELECT id, value FROM StringIds WHERE value LIKE '%nccl%'")
    kinds = {number: _kind(name) for number, name in nccl}
    columns: dict[tuple[int, int], array[int]] = defaultdict(lambda: array("q"))
    for table, name, where in (
        ("CUPTI_ACTIVITY_KIND_KERNEL", "shortName", "1"),
        ("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", None, "1"),  # graphs that nsys traced as a whole
        ("CUPTI_ACTIVITY_KIND_MEMCPY", None, f"k.copyKind = {_DEVICE_TO_DEVICE}"),
    ):
        if export.has(table, "start", "end"):
            for row in export.each(_with_launches(export, table, name, where)):
                start, end, process, device, launched, thread, text = row
                columns[process, device].extend((start, end, launched, thread, kinds.get(text, _COMPUTE)))
    found = {}
    for key, values in columns.items():
        table_of_rank = np.frombuffer(values, np.int64).reshape(-1, 5)
        own = table_of_rank[np.argsort(table_of_rank[:, 0], kind="stable")].T
        found[key] = Kernels(own[0], own[1], own[2], own[3]), own[4]
    return found


def _with_launches(export: NsysExport, table: str, name: str | None, where: str) -> str:
    """The query of start, end, process, device, launch, launching thread and name's id; the process is the thread's
    where the table does not say it."""
    has_process = export.has(table, "globalPid")
    device = "IFNULL(k.deviceId, 0)" if export.has(table, "deviceId") else "0"
    text = f"k.{name}" if name and export.has(table, name) else "NULL"
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


def _ranges(export: NsysExport, is_wanted: Callable[[str], bool]) -> dict[int, list[NvtxRange]]:
    """The NVTX ranges of each process, in order of their begin: NCCL's, and those that are wanted."""
    table = "NVTX_EVENTS"
    if not export.has(table, "start", "end", "eventType", "globalTid"):
        return {}
    payloads = NcclPayloads(export)
    own = "n.text" if export.has(table, "text") else "NULL"
    registered = "(SELECT value FROM StringIds WHERE id = n.textId)" if export.has(table, "textId") else "NULL"
    data = "CAST(n.binaryData AS BLOB)" if export.has(table, "binaryData") else "NULL"
    rows = export.each(
        f"SELECT n.start, n.\"end\", n.globalTid, COALESCE({own}, {registered}, ''), {data} FROM {table} n "
        f'WHERE n.eventType IN {_RANGES} AND n."end" IS NOT NULL ORDER BY n.start'
    )
    by_process: dict[int, list[NvtxRange]] = defaultdict(list)
    for start, end, thread, text, payload in rows:
        if text.startswith("nccl"):
            by_process[thread & _PROCESS].append(NvtxRange(start, end, thread, text, payloads.read(payload)))
        elif is_wanted(text):
            by_process[thread & _PROCESS].append(NvtxRange(start, end, thread, text, NcclCall()))
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
