"""How torch's threads wait for each other. To be imported, and called, before torch is."""

from __future__ import annotations

import os

# What a user may have set: of OpenMP, of GNU's library (torch's packages for CPUs have it), of Intel's and LLVM's.
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def wait_without_spinning() -> None:
    """Let a thread that waits for others sleep, unless the user has chosen how it waits.

    GNU's library has it spin for milliseconds. On free cores that saves a small model the time of waking up. On shared
    cores it takes the time that the awaited threads need.
    """
    if not any(name in os.environ for name in _WAITING):
        os.environ["OMP_WAIT_POLICY"] = "passive"
