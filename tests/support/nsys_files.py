"""Writes files as `nsys export --type sqlite` does, of a pipeline that is known to the nanosecond.

Tables and columns: docs.nvidia.com/nsight-systems, "SQLite Schema Reference", as version 2024.6 exports them (schema
3.16). NCCL's payloads: src/include/nvtx_payload_schemas.h of NCCL 2.24.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE ThreadNames (nameId INTEGER NOT NULL, priority INTEGER, globalTid INTEGER);
CREATE TABLE PROCESSES (globalPid INTEGER, pid INTEGER, name TEXT);
CREATE TABLE ANALYSIS_DETAILS (globalVid INTEGER NOT NULL, duration INTEGER NOT NULL, startTime INTEGER NOT NULL,
    stopTime INTEGER NOT NULL);
CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER, utcTime TEXT, localTime TEXT);
CREATE TABLE TARGET_INFO_SYSTEM_ENV (globalVid INTEGER, devStateName TEXT NOT NULL, name TEXT NOT NULL,
    nameEnum INTEGER NOT NULL, value TEXT NOT NULL);
CREATE TABLE META_DATA_EXPORT (name TEXT NOT NULL, value TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER,
    globalPid INTEGER, demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, mangledName INTEGER,
    launchType INTEGER, cacheConfig INTEGER, registersPerThread INTEGER NOT NULL, gridX INTEGER NOT NULL,
    gridY INTEGER NOT NULL, gridZ INTEGER NOT NULL, blockX INTEGER NOT NULL, blockY INTEGER NOT NULL,
    blockZ INTEGER NOT NULL, staticSharedMemory INTEGER NOT NULL, dynamicSharedMemory INTEGER NOT NULL,
    localMemoryPerThread INTEGER NOT NULL, localMemoryTotal INTEGER NOT NULL, gridId INTEGER NOT NULL,
    sharedMemoryExecuted INTEGER, graphNodeId INTEGER, sharedMemoryLimitConfig INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER,
    globalPid INTEGER, bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL, deprecatedSrcId INTEGER, srcKind INTEGER,
    dstKind INTEGER, srcDeviceId INTEGER, srcContextId INTEGER, dstDeviceId INTEGER, dstContextId INTEGER,
    migrationCause INTEGER, graphNodeId INTEGER, virtualAddress INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL,
    globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL,
    callchainId INTEGER);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER,
    category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER,
    domainId INTEGER, uint64Value INTEGER, int64Value INTEGER, doubleValue REAL, uint32Value INTEGER,
    int32Value INTEGER, floatValue REAL, jsonTextId INTEGER, jsonText TEXT, binaryData TEXT);
CREATE TABLE NVTX_PAYLOAD_SCHEMAS (domainId INTEGER, schemaId INTEGER, name TEXT, type INTEGER, flags INTEGER,
    numEntries INTEGER, payloadSize INTEGER, alignTo INTEGER);
CREATE TABLE NVTX_PAYLOAD_SCHEMA_ENTRIES (domainId INTEGER NOT NULL, schemaId INTEGER NOT NULL, idx INTEGER NOT NULL,
    flags INTEGER, type INTEGER, name TEXT, description TEXT, arrayOrUnionDetail INTEGER, offset INTEGER);
"""

COMMUNICATOR = 0xABCDEF0123456789
_NCCL_DOMAIN, _INIT_SCHEMA, _PAIR_SCHEMA = 1, 1001, 1004
_UINT64, _INT, _SIZE = 18, 5, 22  # NVTX_PAYLOAD_ENTRY_TYPE
_ENTRIES = {
    _INIT_SCHEMA: [(_UINT64, "NCCL communicator ID", None), (_INT, "No. of ranks", 8), (_INT, "Rank", 12),
                   (_INT, "CUDA device", 16)],
    _PAIR_SCHEMA: [(_UINT64, "NCCL communicator ID", None), (_SIZE, "Message size [bytes]", 8),
                   (_INT, "Peer rank", 16)],
}  # fmt: skip
_PUSH_POP = 59
_H2D, _D2D = 1, 8


@dataclass
class Launch:
    """A kernel: on the device from `start` to `end`, launched by the host at `at`; nanoseconds of true time."""

    name: str
    start: int
    end: int
    at: int


@dataclass
class Range:
    """An NVTX range on the host. `payload` of NCCL's calls: bytes and peer; of an init, number of ranks and rank."""

    text: str
    start: int
    end: int
    payload: tuple[int, int] | None = None


@dataclass
class RankEvents:
    """What one process did on its device."""

    rank: int
    launches: list[Launch] = field(default_factory=list)
    ranges: list[Range] = field(default_factory=list)


def write_export(
    path: Path,
    ranks: Sequence[RankEvents],
    *,
    started: int,
    host: str = "node",
    ahead: int = 0,
    without: Sequence[str] = (),
) -> None:
    """Write an export of a session that began at `started` nanoseconds of true time, whose clock is `ahead`.

    Args:
        without: names of columns that this version of nsys does not write.
    """
    connection = sqlite3.connect(path)
    connection.executescript(SCHEMA)
    strings: dict[str, int] = {}

    def string(text: str) -> int:
        return strings.setdefault(text, len(strings) + 1)

    def insert(table: str, **values: object) -> None:
        names = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        row = [values.get(name, 0 if name not in values else None) for name in names]
        connection.execute(f"INSERT INTO {table} VALUES ({','.join('?' * len(names))})", row)

    begin = 1_790_000_000_000_000_000 + started + ahead
    insert("TARGET_INFO_SESSION_START_TIME", utcEpochNs=begin, utcTime="", localTime="")
    insert("TARGET_INFO_SYSTEM_ENV", devStateName="", name="Hostname", value=host)
    insert("META_DATA_EXPORT", name="EXPORT_SCHEMA_VERSION", value="3.16.1")
    for schema, entries in _ENTRIES.items():
        insert(
            "NVTX_PAYLOAD_SCHEMAS",
            domainId=_NCCL_DOMAIN,
            schemaId=schema,
            type=1,
            numEntries=len(entries),
            payloadSize=24,
        )
        for index, (kind, name, offset) in enumerate(entries):
            insert(
                "NVTX_PAYLOAD_SCHEMA_ENTRIES",
                domainId=_NCCL_DOMAIN,
                schemaId=schema,
                idx=index,
                type=kind,
                name=name,
                offset=offset,
            )
    for events in ranks:
        pid = 4000 + events.rank
        process = 1 << 56 | pid << 24
        thread = process | pid
        insert("PROCESSES", globalPid=process, pid=pid, name="VLLM::Worker_PP")
        insert("ThreadNames", nameId=string("python"), globalTid=thread)
        for number, launch in enumerate(events.launches, 1):
            start, end, at = launch.start - started, launch.end - started, launch.at - started
            insert(
                "CUPTI_ACTIVITY_KIND_KERNEL",
                start=start,
                end=end,
                deviceId=events.rank,
                globalPid=process,
                correlationId=number,
                shortName=string(launch.name),
                demangledName=string(f"void {launch.name}(Params)"),
            )
            insert(
                "CUPTI_ACTIVITY_KIND_RUNTIME",
                start=at,
                end=at + 3000,
                globalTid=thread,
                correlationId=number,
                nameId=string("cudaLaunchKernel_v7000"),
            )
        copy = events.launches[0].start - started - 50_000
        insert(
            "CUPTI_ACTIVITY_KIND_MEMCPY",
            start=copy,
            end=copy + 1000,
            deviceId=events.rank,
            globalPid=process,
            bytes=64,
            copyKind=_H2D,
        )
        for each in events.ranges:
            insert(
                "NVTX_EVENTS",
                start=each.start - started,
                end=each.end - started,
                eventType=_PUSH_POP,
                globalTid=thread,
                **_message(each, string),
            )
    connection.executemany("INSERT INTO StringIds VALUES (?, ?)", [(number, text) for text, number in strings.items()])
    for name in without:
        table, column = name.split(".")
        connection.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
    connection.commit()
    connection.close()


def _message(each: Range, string: object) -> dict[str, object]:
    if each.payload is None:
        return {"text": each.text, "textId": None, "binaryData": None}
    first, second = each.payload
    if each.text.startswith("ncclCommInit"):
        schema, data = _INIT_SCHEMA, struct.pack("<Qiiii", COMMUNICATOR, first, second, second, 0)
    else:
        schema, data = _PAIR_SCHEMA, struct.pack("<QQii", COMMUNICATOR, first, second, 0)
    header = struct.pack("<QQQQ", _NCCL_DOMAIN, schema, len(data), 32 + len(data))
    return {"text": None, "textId": string(each.text), "domainId": _NCCL_DOMAIN, "binaryData": header + data}  # type: ignore[operator]


US = 1000  # nanoseconds
KERNELS = ("sm90_xmma_gemm", "flash_fwd_kernel", "sm90_xmma_gemm")


@dataclass
class MicroBatch:
    """Chunks and decodes of a micro-batch, and microseconds of compute on each stage."""

    prefill: int
    decodes: int
    seconds: tuple[int, ...]

    @property
    def label(self) -> str:
        """As vLLM's worker annotates it."""
        return f"execute_context_{int(self.prefill > 0)}({self.prefill})_generation_{self.decodes}({self.decodes})"


def pipeline_events(
    micro_batches: Sequence[MicroBatch], *, transfer: int = 40, depth: int = 2, back: bool = False
) -> tuple[list[RankEvents], list[list[tuple[int, int]]]]:
    """The events of each rank of a pipeline, and when each stage computed each micro-batch, [stage][micro-batch].

    Args:
        transfer: microseconds of a message.
        back: the last stage sends the first one its tokens, of which it needs those of `depth` micro-batches before.
    """
    stages = len(micro_batches[0].seconds)
    ranks = [RankEvents(rank, [], [Range("ncclCommInitRankConfig", 0, US, (stages, rank))]) for rank in range(stages)]
    free = [1000 * US] * stages  # when each stage has nothing to do
    spans: list[list[tuple[int, int]]] = [[] for _ in range(stages)]
    returned: list[int] = []
    for number, batch in enumerate(micro_batches):
        sent = -1  # when the stage before turned to its send
        for stage, events in enumerate(ranks):
            at = free[stage] - 300 * US  # when the host launches: ahead of the device
            stand = free[stage]
            if stage == 0 and number >= depth:
                stand = max(stand, returned[number - depth])
                if back:
                    _nccl(events, "ncclRecv", free[stage], stand, at, stages - 1, 8)
            if stage:
                got = max(stand, sent) + transfer * US
                _nccl(events, "ncclRecv", stand, got, at, stage - 1, batch.prefill + batch.decodes)
                stand = got
            end = stand + batch.seconds[stage] * US
            third = (end - stand) // 3
            events.ranges.append(Range(batch.label, at + 20 * US, at + 60 * US))
            edges = [(stand, stand + third - US), (stand + third, end - third), (end - third, end)]
            for number_of, (name, edge) in enumerate(zip(KERNELS, edges, strict=True)):
                events.launches.append(Launch(name, *edge, at + (30 + 10 * number_of) * US))
            spans[stage].append((stand, end))
            sent = free[stage] = end
            if stage + 1 < stages:
                stands = max(free[stage + 1], end)
                _nccl(
                    events,
                    "ncclSend",
                    end,
                    stands + transfer * US,
                    at + 100 * US,
                    stage + 1,
                    batch.prefill + batch.decodes,
                )
            elif back:
                _nccl(events, "ncclSend", end, end + transfer * US, at + 100 * US, 0, 8)
        returned.append(end + transfer * US)
    return ranks, spans


def _nccl(events: RankEvents, name: str, start: int, end: int, at: int, peer: int, tokens: int) -> None:
    """A call of NCCL on the host at `at`, and its kernel on the device."""
    events.ranges.append(Range(name, at, at + 8 * US, (tokens * 1024, peer)))
    events.launches.append(Launch("ncclDevKernel_SendRecv", start, end, at + 5 * US))
