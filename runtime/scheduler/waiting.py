"""Waiting queues: which request is next, and whether it overtakes a partly dispatched prompt."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from ..core.request import Request

_MOST_USERS = 10_000  # maximum number of users whose virtual times are kept, idle ones included


class WaitingQueue(ABC):
    """Base class of waiting queues. By default, partly dispatched prompts keep their order."""

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """Iterate over the unfinished requests, in no particular order."""

    @abstractmethod
    def push(self, request: Request) -> None:
        """Add a new or preempted request."""

    @abstractmethod
    def head(self) -> Request | None:
        """Return the next request, None if there is none."""

    @abstractmethod
    def pop(self) -> None:
        """Remove the request that `head` returned."""

    def dispatched(self, request: Request, tokens: int) -> None:  # noqa: B027  (most need not know)
        """Record that a chunk of `tokens` tokens of an admitted request has been dispatched."""

    def first_of(self, prompts: Sequence[Request]) -> Request:
        """Return which of `prompts` (partly dispatched, in admission order) continues."""
        return prompts[0]

    def overtakes(self, prompt: Request) -> bool:
        """Return whether the next request overtakes `prompt`, which is partly dispatched."""
        return False


class FirstComeFirstServed(WaitingQueue):
    """Waiting requests in arrival order; subclasses order by a key, and by arrival among equal keys."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []  # by key, then by id

    def __iter__(self) -> Iterator[Request]:
        return iter([entry[2] for entry in self._heap if not entry[2].is_finished])

    def push(self, request: Request) -> None:
        """Add a request by its key; a preempted request keeps its key."""
        if request.order_key is None:
            request.order_key = self.key(request)
        heapq.heappush(self._heap, (request.order_key, request.id, request))

    def head(self) -> Request | None:
        """Return the next request, dropping finished ones before it."""
        heap = self._heap
        while heap and heap[0][2].is_finished:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def pop(self) -> None:
        """Remove the request that `head` returned."""
        heapq.heappop(self._heap)

    def key(self, request: Request) -> float:
        """Return a request's key; the smallest is next. Called once per request."""
        return 0.0


class ShortestPrompt(FirstComeFirstServed):
    """The shortest prompt first: the lowest mean TTFT. Long prompts wait while shorter ones keep coming."""

    def key(self, request: Request) -> float:
        """Return the length of the prompt, in tokens."""
        return float(request.prompt_len)


class EarliestDeadline(FirstComeFirstServed):
    """The earliest deadline first; requests without a deadline come last."""

    def key(self, request: Request) -> float:
        """Return the deadline, in seconds; infinity without one."""
        return math.inf if request.deadline is None else request.deadline


class LowestPriority(FirstComeFirstServed):
    """The lowest `priority` value first; it also overtakes partly dispatched prompts with a higher value."""

    def key(self, request: Request) -> float:
        """Return the priority."""
        return float(request.priority)

    def first_of(self, prompts: Sequence[Request]) -> Request:
        """Return the first of `prompts` with the lowest priority."""
        best = prompts[0]
        for prompt in prompts:
            if prompt.priority < best.priority:
                best = prompt
        return best

    def overtakes(self, prompt: Request) -> bool:
        """Return whether the next request has a lower priority than `prompt`."""
        head = self.head()
        return head is not None and head.priority < prompt.priority


class FairShare(FirstComeFirstServed):
    """Start-time fair queueing over users: the user who has had the fewest tokens is next.

    In virtual time a request starts when its user's previous one ends, but not before the current virtual time. Its
    duration is its token count (prompt plus maximum output). Idle users accumulate no credit.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._ends: dict[str, float] = {}  # by user

    def key(self, request: Request) -> float:
        """Return the request's virtual start time, after its user's earlier requests."""
        start = max(self._now, self._ends.get(request.user, 0.0))
        self._ends[request.user] = start + request.max_len
        return start

    def pop(self) -> None:
        """Remove the request that `head` returned; advance virtual time to its start, and forget users behind it."""
        start, _, _ = heapq.heappop(self._heap)
        self._now = max(self._now, start)
        if len(self._ends) > _MOST_USERS:
            self._ends = {user: end for user, end in self._ends.items() if end > self._now}


class RelativeSlack(WaitingQueue):
    """Requests by slack relative to length, after Medha's LARS: the most urgent is next, dispatched in part or not.

    If TTFT targets are proportional to prompt length, the relative slack is smallest for the prompt with the largest
    ratio of waiting time to length. Time is the number of prompt tokens dispatched since the request arrived, so a
    prompt of 1,000 tokens that has waited for 2,000 is as urgent as one of 100,000 that has waited for 200,000. A short
    prompt overtakes a long one soon after it arrives, and a stream of short prompts delays a long one by at most the
    same multiple of its length.

    Requests of similar length (within a factor of two) share a heap, by arrival. The heads of the heaps are compared.
    """

    def __init__(self) -> None:
        self._lanes: dict[int, list[tuple[float, int, Request]]] = {}  # heaps by bit length of the prompt length
        self._served = 0  # prompt tokens dispatched so far
        self._head: Request | None = None

    def __iter__(self) -> Iterator[Request]:
        return iter([entry[2] for lane in self._lanes.values() for entry in lane if not entry[2].is_finished])

    def push(self, request: Request) -> None:
        """Add a request to the heap of its length; a preempted request keeps its arrival time."""
        if request.order_key is None:
            request.order_key = float(self._served)
        lane = self._lanes.setdefault(request.prompt_len.bit_length(), [])
        heapq.heappush(lane, (request.order_key, request.id, request))

    def head(self) -> Request | None:
        """Return the most urgent among the oldest requests of each heap."""
        found: list[Request] = []
        for lane in self._lanes.values():
            while lane and lane[0][2].is_finished:
                heapq.heappop(lane)
            if lane:
                found.append(lane[0][2])
        self._head = self._most_urgent(found) if found else None
        return self._head

    def pop(self) -> None:
        """Remove the request that `head` returned."""
        assert self._head is not None
        heapq.heappop(self._lanes[self._head.prompt_len.bit_length()])
        self._head = None

    def dispatched(self, request: Request, tokens: int) -> None:
        """Advance time, which is counted in dispatched prompt tokens."""
        self._served += tokens

    def first_of(self, prompts: Sequence[Request]) -> Request:
        """Return the most urgent of `prompts`."""
        return self._most_urgent(prompts)

    def overtakes(self, prompt: Request) -> bool:
        """Return whether the next request is more urgent than `prompt`."""
        head = self.head()
        return head is not None and self._urgency(head) > self._urgency(prompt)

    def _urgency(self, request: Request) -> float:
        """Return the waiting time, in dispatched prompt tokens, divided by the prompt length."""
        assert request.order_key is not None
        return (self._served - request.order_key) / request.prompt_len

    def _most_urgent(self, requests: Sequence[Request]) -> Request:
        best, most = requests[0], self._urgency(requests[0])
        for request in requests:
            urgency = self._urgency(request)
            if urgency > most or (urgency == most and request.id < best.id):
                best, most = request, urgency
        return best


ORDERS: dict[str, type[WaitingQueue]] = {
    "fcfs": FirstComeFirstServed,
    "shortest_prompt": ShortestPrompt,
    "fair_share": FairShare,
    "deadline": EarliestDeadline,
    "priority": LowestPriority,
    "relative_slack": RelativeSlack,
}
