"""How torch's threads wait for each other. To be imported, and called, before torch is."""

from __future__ import annotations

import os
import time

from ..kernels import cores

# What a user may have set: of OpenMP, of GNU's library (torch's packages for CPUs have it), of Intel's and LLVM's.
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_SHORT_SPIN = "10000"  # looks, some tens of microseconds: less than it takes to wake a thread, more than most waits
_LOOKS, _BETWEEN_S = 5, 0.004


def choose_waiting() -> None:
    """Let a thread that waits for others spin for a moment if cores are free, else sleep.

    By itself GNU's library has it spin for milliseconds. On free cores a short spin saves the time of waking up, which
    is a third of a small model's. On shared cores a spin takes the time that the awaited threads need. What the user
    has chosen stays.
    """
    if not any(name in os.environ for name in _WAITING):
        os.environ.update(waiting(others_running(), cores.threads(), os.cpu_count() or 1))


def waiting(others: int, own: int, cores: int) -> dict[str, str]:
    """Return the variables for `own` threads on a machine of `cores` cores on which `others` more threads run."""
    return {"GOMP_SPINCOUNT": _SHORT_SPIN} if others + own <= cores else {"OMP_WAIT_POLICY": "passive"}


def others_running() -> int:
    """Return how many threads of the machine ran beside this one at each of a few looks; 0 if that is not known."""
    seen = []
    for _ in range(_LOOKS):
        try:
            with open("/proc/stat", encoding="ascii") as file:
                seen.append(next(int(line.split()[1]) for line in file if line.startswith("procs_running")))
        except (OSError, StopIteration):
            return 0
        time.sleep(_BETWEEN_S)
    return max(0, min(seen) - 1)
