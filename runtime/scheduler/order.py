"""Orders of admission: which waiting request is next."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict

from ..core.request import Request


class Order(ABC):
    """Gives each waiting request a key, once. The smallest key is admitted next; among equals, the first to arrive."""

    @abstractmethod
    def key(self, request: Request) -> float: ...

    def admitted(self, request: Request) -> None:  # noqa: B027  (most orders need not know)
        """Take note that a request has left the queue."""


class FirstComeFirstServed(Order):
    def key(self, request: Request) -> float:
        return 0.0


class ShortestPrompt(Order):
    """The shortest prompt first: the lowest mean TTFT. Long prompts wait while shorter ones keep coming."""

    def key(self, request: Request) -> float:
        return request.prompt_len


class Deadline(Order):
    """The earliest deadline first; requests without one come after those that have one."""

    def key(self, request: Request) -> float:
        return math.inf if request.deadline is None else request.deadline


class FairShare(Order):
    """Start-time fair queueing over users: the user who has had the fewest tokens is next.

    In virtual time a request starts when its user's last one ended, but not before now. It lasts as long as it has
    tokens (prompt plus longest output). A user who was idle has saved nothing up.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: defaultdict[str, float] = defaultdict(float)

    def key(self, request: Request) -> float:
        start = max(self._now, self._ends[request.user])
        self._ends[request.user] = start + request.max_len
        return start

    def admitted(self, request: Request) -> None:
        assert request.order_key is not None
        self._now = max(self._now, request.order_key)
        if len(self._ends) > 10_000:
            self._ends = defaultdict(float, {user: end for user, end in self._ends.items() if end > self._now})


class RelativeSlack(FirstComeFirstServed):
    """The least slack relative to length first. It changes as requests wait: `SlackQueue` compares them."""


ORDERS: dict[str, type[Order]] = {
    "fcfs": FirstComeFirstServed,
    "shortest_prompt": ShortestPrompt,
    "fair_share": FairShare,
    "deadline": Deadline,
    "relative_slack": RelativeSlack,
}
