"""Interprets NCCL and RCCL kernels and ranges in a trace: operation, direction and peer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .rank_trace import Transfer

Direction = Literal["send", "recv"]
Kind = Literal["compute", "transfer", "unknown"]

_LIBRARY = re.compile(r"(?:void )?(?:nccl|rccl|msccl|oneccl|xccl|hccl|mccl|hcom_)", re.IGNORECASE)
_COLLECTIVE = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|broadcast|all_?to_?all|reduce|gather|barrier", re.I)
_RANGE = re.compile(r"nccl:(?:(send) (\d+)->(\d+)|(recv) (\d+)<-(\d+)|\w+)")
_BYTES_OF_TYPES = {
    8: "double float64 long int64",
    4: "float float32 int int32",
    2: "half float16 bfloat16 short",
    1: "byte char uint8 int8 bool",
}
_BYTES = {name: size for size, names in _BYTES_OF_TYPES.items() for name in names.split()}


def kind_of(kernel: str, arguments: Mapping[str, Any]) -> Kind:
    """Return what a kernel does. All-reduces and other collectives count as compute.

    The kernel's arguments decide, since RCCL and NCCL before 2.14 run several operations in kernels of one name.
    """
    if not _LIBRARY.match(kernel):
        return "compute"
    collective = str(arguments.get("Collective name", "")).lower()
    if collective.startswith(("send", "recv")):
        return "transfer"
    if _COLLECTIVE.search(collective):
        return "compute"
    if "sendrecv" in kernel.lower():
        return "transfer"
    return "compute" if collective or _COLLECTIVE.search(kernel) else "unknown"


@dataclass(frozen=True, slots=True)
class Range:
    """A torch annotation around NCCL work. `own` and `peer` are ranks within a process group."""

    start: float
    end: float
    direction: Direction | None = None  # None: neither a send nor a receive
    own: int = 0
    peer: int = 0

    @classmethod
    def of(cls, name: str, start: float, end: float) -> Range | None:
        """Parse an annotation; None if it is not NCCL's."""
        found = _RANGE.match(name)
        if found is None:
            return None
        if found[1] is None and found[4] is None:
            return cls(start, end)
        if found[1]:
            return cls(start, end, "send", int(found[2]), int(found[3]))
        return cls(start, end, "recv", int(found[5]), int(found[6]))


@dataclass(slots=True)
class ProcessGroups:
    """The process groups of a rank, by name: their global ranks."""

    ranks: dict[str, list[int]] = field(default_factory=dict)

    def add(self, name: str, ranks: object) -> None:
        """Add a group. Abbreviated lists, such as `[0, 1, ..., 63]`, are ignored."""
        if isinstance(ranks, str):
            try:
                ranks = json.loads(ranks)
            except ValueError:
                return
        if name and isinstance(ranks, list) and ranks and all(type(rank) is int for rank in ranks):
            self.ranks[name] = ranks

    def add_config(self, config: object) -> None:
        """Add the groups of `pg_config` in a trace's `distributedInfo`."""
        groups = config.values() if isinstance(config, dict) else config
        for group in groups if isinstance(groups, Iterable) else ():
            if isinstance(group, dict):
                self.add(str(group.get("pg_name", "")), group.get("ranks"))

    def peer(self, found: Range, group: str, rank: int) -> int | None:
        """Return a peer's global rank by `group`, or by all groups if it is unknown; None if they do not agree.

        If no groups were recorded, `found.peer` is taken as a global rank, provided that `found.own` is `rank`.
        """
        groups = [self.ranks[group]] if group in self.ranks else list(self.ranks.values())
        if not groups:
            return found.peer if found.own == rank else None
        fitting = [g for g in groups if max(found.own, found.peer) < len(g) and g[found.own] == rank]
        peers = {g[found.peer] for g in fitting}
        return peers.pop() if len(peers) == 1 else None


def transfer_of(arguments: Mapping[str, Any], start: float, end: float) -> tuple[Direction | None, Transfer]:
    """Return a kernel's direction and transfer, as far as its arguments specify them."""
    name = str(arguments.get("Collective name", "")).lower()
    direction: Direction | None = "send" if name == "send" else "recv" if name.startswith("recv") else None
    peer = arguments.get("Dst Rank" if direction == "send" else "Src Rank") if direction else None
    elements = arguments.get("In msg nelems") or arguments.get("Out msg nelems")
    size = _BYTES.get(str(arguments.get("dtype", "")).lower())
    return direction, Transfer(
        start,
        end,
        int(str(peer)) if str(peer).isdecimal() else None,
        elements * size if size and isinstance(elements, int) else None,
        str(arguments.get("Process Group Name", "")),
    )
