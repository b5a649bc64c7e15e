"""Admission of requests that another pipeline has prefilled (disaggregated prefill)."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from collections import deque

from ..core.block_pool import BlockPool
from ..core.request import Request


class KvReceiver:
    """Reserves KV blocks for requests whose KV is on another pipeline, first come, first served.

    Each needs blocks for its tokens, with one spare block per block table of each running request.
    """

    def __init__(self) -> None:
        self.queue: deque[Request] = deque()  # not admitted
        self.num_receiving = 0  # admitted requests whose KV is in flight
        self.is_short_of_kv = False  # whether the first in the queue lacks blocks

    def admit(self, running: dict[int, Request], slots: int, pool: BlockPool) -> list[Request]:
        """Move requests to `running` until it has `slots` or blocks run short, and return them."""
        admitted: list[Request] = []
        self.is_short_of_kv = False
        while self.queue and len(running) < slots:
            request = self.queue[0]
            spare = len(running) * pool.num_groups
            if pool.blocks_for(request.num_tokens) + spare > pool.num_free:
                self.is_short_of_kv = True
                break
            self.queue.popleft()
            pool.reserve(request, request.num_tokens)
            running[request.id] = request
            admitted.append(request)
        self.num_receiving += len(admitted)
        return admitted

    def received(self, request: Request) -> None:
        """Count a request's prompt as computed: its KV has arrived."""
        request.num_completed = request.num_dispatched
        self.num_receiving -= 1
