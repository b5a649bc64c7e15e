"""What NCCL says of its calls in NVTX: peer, bytes and communicator, which Nsight Systems exports as bytes.

NCCL pushes a range of its own domain for each call, `ncclSend` and `ncclRecv` among them, with a payload: a C struct
whose fields `NVTX_PAYLOAD_SCHEMA_ENTRIES` names (NCCL's src/include/nvtx_payload_schemas.h). Its bytes are in
`NVTX_EVENTS.binaryData`: a header of 32 (domain, schema, payload's and total size, eight bytes each), then the struct.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from .nsys_export import NsysExport

_HEADER = struct.Struct("<QQQQ")
_FORMATS = {  # by NVTX_PAYLOAD_ENTRY_TYPE, of nvtx3/nvToolsExtPayload.h
    5: "<i", 6: "<I", 7: "<q", 8: "<Q", 9: "<q", 10: "<Q", 15: "<i", 16: "<I", 17: "<q", 18: "<Q", 22: "<Q",
}  # fmt: skip
_COMMUNICATOR, _BYTES, _PEER = "NCCL communicator ID", "Message size [bytes]", "Peer rank"
_RANKS, _RANK = "No. of ranks", "Rank"


@dataclass(frozen=True, slots=True)
class NcclCall:
    """What one call of NCCL says; None where its payload does not."""

    communicator: int | None = None
    bytes: int | None = None
    peer: int | None = None
    num_ranks: int | None = None
    rank: int | None = None


class NcclPayloads:
    """Reads the payloads of one export."""

    def __init__(self, export: NsysExport) -> None:
        self._fields: dict[int, list[tuple[str, str, int]]] = {}
        table = "NVTX_PAYLOAD_SCHEMA_ENTRIES"
        if not export.has(table, "schemaId", "type", "name", "offset"):
            return
        rows = export.rows(f'SELECT DISTINCT schemaId, type, name, "offset" FROM {table}')
        for schema, kind, name, offset in rows:
            if kind in _FORMATS and name:
                self._fields.setdefault(int(schema), []).append((str(name), _FORMATS[kind], int(offset or 0)))

    def read(self, data: bytes | None) -> NcclCall:
        """Read the payload of a range; one that is not there or unknown says nothing."""
        if data is None or len(data) < _HEADER.size:
            return NcclCall()
        _, schema, _, _ = _HEADER.unpack_from(data)
        values: dict[str, int] = {}
        for name, form, offset in self._fields.get(schema, []):
            if _HEADER.size + offset + struct.calcsize(form) <= len(data):
                (values[name],) = struct.unpack_from(form, data, _HEADER.size + offset)
        return NcclCall(
            values.get(_COMMUNICATOR), values.get(_BYTES), values.get(_PEER), values.get(_RANKS), values.get(_RANK)
        )
