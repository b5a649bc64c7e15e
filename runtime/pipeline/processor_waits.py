"""Run-queue delay of this process's threads: time runnable but waiting for a CPU, as counted by Linux."""

from __future__ import annotations

import contextlib
import os

_AGAIN = 32  # reads of all threads between two scans for new threads
_SELF = "/proc/thread-self/schedstat"


class ProcessorWaits:
    """Seconds that threads spent in a CPU's run queue; 0 if the system does not count them.

    Create it in the compute thread. A read takes about half a microsecond per thread.
    """

    def __init__(self) -> None:
        self._own = _opened(_SELF)
        self._all: dict[str, int] = {}
        self._reads = 0

    def own(self) -> float:
        """Return the seconds of the thread that created this object."""
        return _seconds(self._own)

    def all(self, *, anew: bool = False) -> float:
        """Return the seconds of all known threads; with `anew`, scan for new threads from time to time."""
        if anew:
            if self._reads % _AGAIN == 0 and self._own is not None:
                for thread in set(os.listdir("/proc/self/task")) - set(self._all):
                    if (file := _opened(f"/proc/self/task/{thread}/schedstat")) is not None:
                        self._all[thread] = file
            self._reads += 1
        return sum(map(_seconds, self._all.values()))

    def close(self) -> None:
        """Close the files that it reads."""
        for file in (self._own, *self._all.values()):
            if file is not None:
                os.close(file)


def _opened(path: str) -> int | None:
    with contextlib.suppress(OSError):
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return None


def _seconds(file: int | None) -> float:
    """Return the second number of a schedstat file, nanoseconds in the run queue; 0 if the thread has exited."""
    with contextlib.suppress(OSError, IndexError):
        if file is not None:
            return int(os.pread(file, 96, 0).split()[1]) * 1e-9
    return 0.0
