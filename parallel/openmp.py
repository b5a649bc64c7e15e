"""Configures how torch's OpenMP threads wait for each other. Must be imported and called before torch is imported."""

from __future__ import annotations

import os
import time

from ..kernels import cores

# Variables a user may have set: OpenMP's, GNU libgomp's (used by torch's CPU packages), and Intel's and LLVM's.
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_SHORT_SPIN = "10000"  # spins, some tens of microseconds: less than waking a thread, more than most waits
_LOOKS, _BETWEEN_S = 5, 0.004


def choose_waiting() -> None:
    """Let waiting threads spin briefly if cores are free, else sleep.

    By default libgomp spins for milliseconds. On free cores a short spin saves the wake-up latency, a third of a small
    model's time. On shared cores spinning takes CPU time from the threads that are waited for. The user's own settings
    are kept.
    """
    if not any(name in os.environ for name in _WAITING):
        os.environ.update(waiting(others_running(), cores.threads(), os.cpu_count() or 1))


def waiting(others: int, own: int, cores: int) -> dict[str, str]:
    """Return the variables for `own` threads on a machine with `cores` cores and `others` other running threads."""
    return {"GOMP_SPINCOUNT": _SHORT_SPIN} if others + own <= cores else {"OMP_WAIT_POLICY": "passive"}


def others_running() -> int:
    """Return the minimum number of other running threads on the machine over a few samples; 0 if unknown."""
    seen = []
    for _ in range(_LOOKS):
        try:
            with open("/proc/stat", encoding="ascii") as file:
                seen.append(next(int(line.split()[1]) for line in file if line.startswith("procs_running")))
        except (OSError, StopIteration):
            return 0
        time.sleep(_BETWEEN_S)
    return max(0, min(seen) - 1)
