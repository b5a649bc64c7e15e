"""How long this process's threads could have run and waited for a processor, as Linux counts it."""

from __future__ import annotations

import contextlib
import os

_AGAIN = 32  # reads of all threads, after which new threads are looked for
_SELF = "/proc/thread-self/schedstat"


class ProcessorWaits:
    """Seconds that threads spent in a processor's queue; 0 where the system does not count them.

    Made in the thread that computes. A read takes about half a microsecond a thread.
    """

    def __init__(self) -> None:
        self._own = _opened(_SELF)
        self._all: dict[str, int] = {}
        self._reads = 0

    def own(self) -> float:
        """Return the seconds of the thread that made this object."""
        return _seconds(self._own)

    def all(self, *, anew: bool = False) -> float:
        """Return the seconds of all threads that are known; with `anew` those that have come since are looked for."""
        if anew:
            if self._reads % _AGAIN == 0 and self._own is not None:
                for thread in set(os.listdir("/proc/self/task")) - set(self._all):
                    if (file := _opened(f"/proc/self/task/{thread}/schedstat")) is not None:
                        self._all[thread] = file
            self._reads += 1
        return sum(map(_seconds, self._all.values()))

    def close(self) -> None:
        """Close what it reads."""
        for file in (self._own, *self._all.values()):
            if file is not None:
                os.close(file)


def _opened(path: str) -> int | None:
    with contextlib.suppress(OSError):
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return None


def _seconds(file: int | None) -> float:
    """Return the second number of such a file, nanoseconds in the queue; 0 of a thread that has ended."""
    with contextlib.suppress(OSError, IndexError):
        if file is not None:
            return int(os.pread(file, 96, 0).split()[1]) * 1e-9
    return 0.0
