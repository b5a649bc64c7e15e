"""Memory of processes on this machine."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from pathlib import Path

from tests.support.processes import descendants_of

_PAGE = os.sysconf("SC_PAGE_SIZE")


class MemoryLog:
    """Samples the resident memory of processes, by name."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._minutes: list[float] = []
        self._mib: dict[str, list[float]] = {}

    async def watch(self, names: dict[int, str]) -> None:
        """Sample these processes once per second until cancelled."""
        while True:
            self._minutes.append((time.monotonic() - self._began) / 60)
            for pid, name in names.items():
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                self._mib.setdefault(name, []).append(pages * _PAGE / (1 << 20))
            await asyncio.sleep(1.0)

    def growth(self) -> list[dict[str, str | float]]:
        """Return a row per process: its memory after the first quarter of the samples and the slope of a linear fit."""
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
    """Return the proportional set size of a process and its descendants, in bytes."""
    total = 0.0
    for one in [pid, *descendants_of(pid)]:
        try:
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total
