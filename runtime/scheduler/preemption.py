"""Preemption: which running requests give up their KV cache for more urgent ones."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from ..core.block_pool import BlockPool
from ..core.request import Request


class Preemption:
    """Picks the least urgent requests: the newest, or under `order=priority` those with the highest `priority` first.

    A victim with tokens in flight is `yielding` until they are back: it keeps its blocks, and is scheduled no further.
    """

    def __init__(self, by_priority: bool) -> None:
        self.by_priority = by_priority
        self.yielding: dict[int, Request] = {}  # running requests, by id

    def urgency(self, request: Request) -> tuple[int, int]:
        """Return a request's sort key, most urgent first."""
        return request.priority if self.by_priority else 0, request.id

    def victim(self, request: Request, running: dict[int, Request]) -> Request | None:
        """Return the least urgent request without tokens in flight, if it is less urgent than `request`."""
        victim = max((r for r in running.values() if not r.in_flight), key=self.urgency, default=request)
        return victim if self.urgency(victim) > self.urgency(request) else None

    def victims(
        self, urgent: Request, need: int, running: dict[int, Request], slots: int, pool: BlockPool
    ) -> list[Request]:
        """Return the requests whose preemption makes room for a waiting one that needs `need` blocks.

        There are none if it has room already, or if preempting all that are less urgent is not enough.
        """
        leaving = {r.id: r for r in running.values() if r.is_finished} | self.yielding
        count = len(running) - len(leaving)
        free = pool.num_free + sum(pool.num_of(r) for r in leaving.values())
        others = [r for r in running.values() if r.priority > urgent.priority and r.id not in leaving]
        others.sort(key=self.urgency)
        victims: list[Request] = []
        while count >= slots or need + count * pool.num_groups > free:
            if not others:
                return []
            victims.append(others.pop())
            count -= 1
            free += pool.num_of(victims[-1])
        return victims
