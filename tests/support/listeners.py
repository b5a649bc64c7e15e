"""The addresses at which processes listen, as `/proc` tells them."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

_LISTEN = "0A"  # the state in /proc/net/tcp


def listeners_of(pids: Iterable[int]) -> dict[tuple[str, int], str]:
    """Return (address, port) of each TCP socket on which one of `pids` listens, and the name of its process."""
    owners: dict[str, str] = {}
    for pid in pids:
        folder = Path("/proc") / str(pid)
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            name = (folder / "comm").read_text().strip()
            for descriptor in list((folder / "fd").iterdir()):
                with contextlib.suppress(FileNotFoundError):
                    link = os.readlink(descriptor)
                    if link.startswith("socket:["):
                        owners[link[8:-1]] = f"{name} {pid}"
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and fields[9] in owners:
                address, port = fields[1].split(":")
                found[_text(address), int(port, 16)] = owners[fields[9]]
    return found


def _text(address: str) -> str:
    """Turn the kernel's hexadecimal words, each in this machine's byte order, into an address."""
    words = (int(address[i : i + 8], 16) for i in range(0, len(address), 8))
    family = socket.AF_INET if len(address) == 8 else socket.AF_INET6
    return socket.inet_ntop(family, b"".join(struct.pack("=I", word) for word in words)).removeprefix("::ffff:")
