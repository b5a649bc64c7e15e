"""The clients of a workload: which request is sent next, and when."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

import math
from collections.abc import Iterable
from heapq import heappop, heappush

from ...conf.workloads import WorkloadConfig
from ..core.work_item import WorkItem


class Clients:
    """Schedules when each request of a workload is sent: in order, at its arrival time.

    In a closed loop there are `max_concurrency` clients. Each waits for its answer, thinks, and then sends the next
    request. No request is sent after `duration_s`. Times are seconds on the same clock as `start`.

    Args:
        items: in order of arrival, in seconds from the start.
        config: the workload config; None: no closed loop, and no time limit.
        start: when the first request may be sent.
        front: front-end latency: seconds per request until the engine has it, plus seconds per prompt token.
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
        self._free: list[float] = []  # a heap: when each answered client has finished thinking
        self._think_s = 0.0 if config is None else config.think_ms / 1e3
        seconds = None if config is None else config.duration_s
        self._end = math.inf if seconds is None else start + seconds

    @property
    def due(self) -> float:
        """When the next request reaches the engine; infinity if an answer must come first, or if none is left."""
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
        """Whether no more requests will be sent. Only `due` checks `duration_s`."""
        return self._next is None

    def take(self) -> WorkItem:
        """Take the next request. Call this only when it is due."""
        item = self._next
        assert item is not None
        if self._unused:
            self._unused -= 1
        elif self._is_closed:
            heappop(self._free)
        self._next = next(self._items, None)
        return item

    def answered(self, at: float, number: int = 1) -> None:
        """Record that `number` requests ended at time `at`."""
        if self._is_closed:
            for _ in range(number):
                heappush(self._free, at + self._think_s)
