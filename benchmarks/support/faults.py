"""Injects faults into a running pipeline: kills or stops a process, cuts a connection. Linux only."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes import descendants_of

_PIDFD_GETFD = 438  # Linux system call number; the standard library lacks it
_libc = ctypes.CDLL(None, use_errno=True)
_LISTEN = "0A"  # the state in /proc/net/tcp


@dataclass(frozen=True)
class Socket:
    """A socket descriptor of a process; addresses are the kernel's hexadecimal strings."""

    descriptor: int
    local: str
    remote: str
    is_listening: bool

    @property
    def port(self) -> int:
        return int(self.local.rsplit(":", 1)[1], 16)


def sockets_of(pid: int, tables: tuple[str, ...] = ("tcp", "tcp6")) -> list[Socket]:
    """Return the sockets of a process that are listed in these tables of `/proc/PID/net`."""
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


def ranks_below(pid: int) -> list[int]:
    """Return the descendants of `pid` that run a rank under Ray, without spares."""
    found = []
    for child in descendants_of(pid):
        with suppress(OSError):
            if Path(f"/proc/{child}/cmdline").read_bytes().startswith(b"ray::RankActor.run"):
                found.append(child)
    return sorted(found)


def ray_s_own_below(pid: int, name: str) -> int:
    """Return Ray's own process below `pid` whose program or title ends with `name`, e.g. `raylet`."""
    for child in descendants_of(pid):
        with suppress(OSError):
            if Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[0].rstrip().endswith(name.encode()):
                return child
    raise AssertionError(f"Ray has no {name}")


def kill(pid: int) -> None:
    """Kill a process (SIGKILL)."""
    os.kill(pid, signal.SIGKILL)


def stop(pid: int) -> None:
    """Make a process hang (SIGSTOP): its connections stay open."""
    os.kill(pid, signal.SIGSTOP)


def cut(one: int, other: int) -> int:
    """Reset the TCP connections between two processes of one user, as a network switch might.

    Returns:
        The number of connections.

    Raises:
        OSError: this process may not access the other one (`kernel.yama.ptrace_scope`).
    """
    peers = {(end.local, end.remote) for end in sockets_of(other)}
    pidfd = os.pidfd_open(one)
    count = 0
    try:
        for end in sockets_of(one):
            if (end.remote, end.local) not in peers:
                continue
            copy = _libc.syscall(_PIDFD_GETFD, pidfd, end.descriptor, 0)
            if copy < 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            with socket.socket(fileno=copy) as connection, suppress(OSError):  # the other end may have just gone
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    finally:
        os.close(pidfd)
    return count


def cut_among(pids: Collection[int]) -> int:
    """Cut the connections between each two of these processes; return how many there were."""
    return sum(cut(one, other) for one in pids for other in pids if one < other)
