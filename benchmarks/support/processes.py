"""Processes of this machine, and their memory."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")


def children_by_parent() -> dict[int, list[int]]:
    """Return the processes that each process has started."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    return children


def descendants_of(pid: int) -> list[int]:
    """Return all processes below one."""
    children, left, found = children_by_parent(), [pid], []
    while left:
        below = sorted(children.get(left.pop(), []))
        left += below
        found += below
    return found


def roles_of(front: int) -> dict[int, str]:
    """Return the processes of a server: the front, and below it engines and Ray's actors."""
    roles, ranks = {front: "front"}, 0
    for child in descendants_of(front):
        command = Path(f"/proc/{child}/cmdline").read_bytes()
        if b"spawn_main" in command:
            roles[child] = f"engine {sum(role.startswith('engine') for role in roles.values())}"
        elif command.startswith(b"ray::RankActor"):
            roles[child] = f"rank process {ranks}"
            ranks += 1
    return roles


class MemoryLog:
    """Resident MiB of processes by their names, from now on."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._minutes: list[float] = []
        self._mib: dict[str, list[float]] = {}

    def sample(self, names: dict[int, str]) -> None:
        """Note what each of these processes has now; they are the same at every call."""
        self._minutes.append((time.monotonic() - self._began) / 60)
        for pid, name in names.items():
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            self._mib.setdefault(name, []).append(pages * _PAGE / (1 << 20))

    async def watch(self, names: dict[int, str]) -> None:
        """Note it once a second, until cancelled."""
        while True:
            self.sample(names)
            await asyncio.sleep(1.0)

    def growth(self) -> list[dict[str, str | float]]:
        """Return a row for each process: its memory after the first quarter, and the slope of the line through it."""
        first = len(self._minutes) // 4
        minutes = self._minutes[first:]
        return [
            {
                "process": name,
                "first_mib": mib[first],
                "last_mib": mib[-1],
                "most_mib": max(mib[first:]),
                "mib_per_minute": statistics.linear_regression(minutes, mib[first:]).slope,
            }
            for name, mib in self._mib.items()
        ]


def tree_memory(pid: int) -> float:
    """Return the bytes that a process and its descendants have, a shared page divided among those that map it."""
    total = 0.0
    for one in [pid, *descendants_of(pid)]:
        try:
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total
