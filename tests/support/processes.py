"""The processes of this machine, as `/proc` tells them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.tiers import HANGS_S


def _all() -> Iterator[tuple[int, str, int, int]]:
    """Process id, state, parent, process group."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, group = path.read_text().rsplit(")", 1)[1].split()[:3]
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
        yield int(path.parent.name), state, int(parent), int(group)


def is_alive(pid: int) -> bool:
    return any(found == pid and state != "Z" for found, state, _, _ in _all())


def members_of(group: int) -> list[int]:
    """Return the processes of a process group, by id."""
    return [pid for pid, state, _, of in _all() if of == group and state != "Z"]


def descendants_of(pid: int) -> list[int]:
    """Return the children of a process, and theirs."""
    parents = {child: parent for child, _, parent, _ in _all()}
    found = [pid]
    for ancestor in found:
        found += [child for child, parent in parents.items() if parent == ancestor]
    return found[1:]


def program_of(pid: int) -> str:
    """Return the name of the file that a process runs."""
    return Path(Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]).name


def assert_gone(pids: list[int]) -> None:
    """Check that processes have ended, or do soon."""
    deadline = time.monotonic() + HANGS_S
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.1)
