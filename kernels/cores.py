"""The cores that a process may compute on, and the resulting thread count. Imports no torch.

An operator is as slow as its slowest thread. So there is one thread per core, not per hardware thread, none on the slow
cores of a hybrid machine, and no more than a container's CPU quota, which would throttle them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_BINDING = ("OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")  # set by users to bind threads
_SLOWER = 1.25  # exponent of a core's capacity or clock: vector code slows down more than they suggest
_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Cores:
    """The cores that a process computes on.

    Attributes:
        cpus: per core, the hardware threads that the process may use.
        others: number of slower cores that it may use but does not.
        quota: CPU limit of its control groups, in CPUs; infinite if there is no limit.
    """

    cpus: tuple[frozenset[int], ...]
    others: int
    quota: float

    @property
    def count(self) -> int:
        """The number of threads for the process, at least one."""
        return max(1, round(min(len(self.cpus), self.quota)))

    def __str__(self) -> str:
        number = len(self.cpus)
        of = f" fast ones of {number + self.others}" if self.others else ""
        cores = "core" if number + self.others == 1 else "cores"
        return f"{number}{of} {cores}" + (f", CPU quota {self.quota:g}" if self.quota < number else "")


def find(root: Path = _ROOT, allowed: Collection[int] | None = None) -> Cores:
    """Return the cores of this process.

    Args:
        root: the folder that contains `sys` and `proc`.
        allowed: the hardware threads that it may use; None: its CPU affinity.
    """
    if allowed is None:
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores: dict[int, set[int]] = {}
    for cpu in sorted(allowed):
        siblings = _numbers(_read(_folder(root, cpu) / "topology/thread_siblings_list"))
        cores.setdefault(min(siblings | {cpu}), set()).add(cpu)
    fast = _fast(_speeds(root, cores))
    if own := cores.keys() & _numbers(_read(root / "sys/devices/cpu_core/cpus")):  # Intel hybrid processors only
        fast = own
    return Cores(tuple(frozenset(cores[core]) for core in sorted(fast)), len(cores) - len(fast), _quota(root))


def threads(ranks: int = 1) -> int:
    """Return the number of threads per rank if `ranks` ranks share this machine."""
    return max(1, find().count // ranks)


def pin(threads: int, root: Path = _ROOT) -> None:
    """Bind this thread, and the threads that it starts, to the fast cores of a hybrid machine.

    Does nothing if there are fewer fast cores than `threads`, or if the user has already bound the process or threads.
    """
    found = find(root)
    if not found.others or threads > len(found.cpus) or any(name in os.environ for name in _BINDING):
        return
    if len(os.sched_getaffinity(0)) == os.cpu_count():
        with suppress(OSError):
            os.sched_setaffinity(0, frozenset().union(*found.cpus))


def _fast(speeds: Mapping[int, float]) -> Collection[int]:
    """Return the fastest cores, with the cutoff that maximizes throughput if all run at the slowest one's speed."""
    least = max(set(speeds.values()), key=lambda least: sum(s >= least for s in speeds.values()) * least**_SLOWER)
    return [core for core, speed in speeds.items() if speed >= least]


def _speeds(root: Path, cores: Collection[int]) -> dict[int, float]:
    """Return the cores' capacities (Linux on Arm), else their maximum clocks, else 1.0 each."""
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        texts = {core: _read(_folder(root, core) / name).strip() for core in cores}
        if all(map(str.isdigit, texts.values())):
            return {core: float(text) for core, text in texts.items()}
    return dict.fromkeys(cores, 1.0)


def _quota(root: Path) -> float:
    """Return the smallest CPU quota of this process's control groups, v1 and v2, from its own up to the root."""
    found = [math.inf]
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # In a container the path may be the host's and not exist here; the container's own group is then the root.
        parts = [] if ".." in path else path.strip("/").split("/")
        for mount in (controllers, "cpu") if controllers else ("", "unified"):
            for depth in range(len(parts) + 1):
                found.append(_limit((root / "sys/fs/cgroup" / mount).joinpath(*parts[:depth])))
    return min(found)


def _limit(group: Path) -> float:
    words = _read(group / "cpu.max").split() or [_read(group / f"cpu.cfs_{n}_us").strip() for n in ("quota", "period")]
    quota, period = (int(word) if word.isdigit() else 0 for word in words)  # "max" and -1 are no limit
    return quota / period if quota and period else math.inf


def _folder(root: Path, cpu: int) -> Path:
    return root / f"sys/devices/system/cpu/cpu{cpu}"


def _numbers(text: str) -> set[int]:
    """Parse a list of numbers such as `0-3,8`."""
    parts = [part.partition("-") for part in text.strip().split(",") if part]
    return {number for first, _, last in parts for number in range(int(first), int(last or first) + 1)}


def _read(path: Path) -> str:
    """Return a file's text; empty if it cannot be read."""
    with suppress(OSError):
        return path.read_text()
    return ""
