"""The clients of a workload: which request is sent next, and when."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

import math
from collections.abc import Iterable
from heapq import heappop, heappush

from ...conf.workloads import WorkloadConfig
from .workload import WorkItem


class Clients:
    """Says when each request of a workload is sent: in their order, when it arrives.

    In a closed loop (`max_concurrency`) one of so many clients sends it. Each waits for its answer, thinks, and then
    sends the next. No request is sent once `duration_s` are over. Times are seconds on the clock that `start` is of.

    Args:
        items: in the order of their arrivals, which are seconds from the start.
        config: of the workload; None: no closed loop, and no end but the last request.
        start: when the first may be sent.
        front: seconds from there until the engine has a request, and those that each prompt token adds.
    """

    def __init__(
        self,
        items: Iterable[WorkItem],
        config: WorkloadConfig | None = None,
        start: float = 0.0,
        front: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self._items = iter(items)
        self._next: WorkItem | None = next(self._items, None)
        self._start = start
        self._front = front
        most = None if config is None else config.max_concurrency
        self._is_closed = most is not None
        self._unused = most or 0  # clients that have not sent anything yet
        self._free: list[float] = []  # a heap: when each of the others that has its answer will have thought
        self._think_s = 0.0 if config is None else config.think_ms / 1e3
        seconds = None if config is None else config.duration_s
        self._end = math.inf if seconds is None else start + seconds

    @property
    def due(self) -> float:
        """When the next request is at the engine; infinity where an answer must come first, and where none is left."""
        if self._next is None:
            return math.inf
        due = self._start + self._next.arrival
        if self._is_closed and not self._unused:
            if not self._free:
                return math.inf
            due = max(due, self._free[0])
        if due >= self._end:
            self._next = None
            return math.inf
        return due + self.to_engine(self._next)

    def to_engine(self, item: WorkItem) -> float:
        """Return the seconds from when a request is sent until the engine has it."""
        of_request, of_token = self._front
        return of_request + of_token * len(item.prompt)

    @property
    def are_done(self) -> bool:
        """Whether no request will be sent any more. `due` finds out that the time is over."""
        return self._next is None

    def take(self) -> WorkItem:
        """Take the next request; call it when that is due."""
        item = self._next
        assert item is not None
        if self._unused:
            self._unused -= 1
        elif self._is_closed:
            heappop(self._free)
        self._next = next(self._items, None)
        return item

    def answered(self, at: float, number: int = 1) -> None:
        """Note that a `number` of requests ended at a time."""
        if self._is_closed:
            for _ in range(number):
                heappush(self._free, at + self._think_s)
