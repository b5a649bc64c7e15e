"""Faults of a running pipeline: a process killed or stopped, a connection between two processes cut. Linux only."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from .processes import children_by_parent

_PIDFD_GETFD = 438  # the number of Linux's system call, which the standard library does not offer
_libc = ctypes.CDLL(None, use_errno=True)


def ranks_below(pid: int) -> list[int]:
    """Return the processes below `pid` that run a rank under Ray, spares not included."""
    children, left, found = children_by_parent(), [pid], []
    while left:
        for child in children.get(left.pop(), []):
            left.append(child)
            with suppress(OSError):
                if Path(f"/proc/{child}/cmdline").read_bytes().startswith(b"ray::RankActor.run"):
                    found.append(child)
    return sorted(found)


def kill(pid: int) -> None:
    """End a process at once."""
    os.kill(pid, signal.SIGKILL)


def stop(pid: int) -> None:
    """Have a process hang: its connections stay, and it does nothing."""
    os.kill(pid, signal.SIGSTOP)


def cut(one: int, other: int) -> int:
    """Cut the TCP connections between two processes of one user, as a switch would that resets them.

    Returns:
        How many there were.

    Raises:
        OSError: the system does not let this process reach into another one (`kernel.yama.ptrace_scope`).
    """
    peers = _ends_of(other)
    pidfd = os.pidfd_open(one)
    count = 0
    try:
        for descriptor, local, remote in _sockets_of(one):
            if (remote, local) not in peers:
                continue
            copy = _libc.syscall(_PIDFD_GETFD, pidfd, descriptor, 0)
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


def _ends_of(pid: int) -> set[tuple[str, str]]:
    return {(local, remote) for _, local, remote in _sockets_of(pid)}


def _sockets_of(pid: int) -> list[tuple[int, str, str]]:
    """The descriptor, local and remote address of each TCP connection of a process, addresses as the kernel writes."""
    by_inode: dict[str, tuple[str, str]] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            by_inode[fields[9]] = fields[1], fields[2]
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            if (match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry))) and match[1] in by_inode:
                found.append((int(entry.name), *by_inode[match[1]]))
    return found
