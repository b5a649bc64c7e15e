"""Processes of this machine, and the memory of one with its descendants."""

from __future__ import annotations

from pathlib import Path


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


def tree_memory(pid: int) -> float:
    """Return the bytes that a process and its descendants have, a shared page divided among those that map it."""
    children = children_by_parent()
    total, left = 0.0, [pid]
    while left:
        one = left.pop()
        left += children.get(one, [])
        try:
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total
