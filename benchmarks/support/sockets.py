"""The TCP sockets of a process, as Linux tells them."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_LISTEN = "0A"  # the state in /proc/net/tcp


@dataclass(frozen=True)
class Socket:
    """A descriptor of the process, and its ends in the kernel's hexadecimal words."""

    descriptor: int
    local: str
    remote: str
    is_listening: bool

    @property
    def port(self) -> int:
        return int(self.local.rsplit(":", 1)[1], 16)


def sockets_of(pid: int, tables: tuple[str, ...] = ("tcp", "tcp6")) -> list[Socket]:
    """Return the sockets of a process that are in these tables of `/proc/PID/net`."""
    by_inode: dict[str, list[str]] = {}
    for table in tables:
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            by_inode[fields[9]] = fields
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            if (match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry))) and match[1] in by_inode:
                fields = by_inode[match[1]]
                found.append(Socket(int(entry.name), fields[1], fields[2], fields[3] == _LISTEN))
    return found
