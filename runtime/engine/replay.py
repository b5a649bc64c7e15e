"""Replays a workload: requests that arrive over time, through one coordinator, on the pipeline's own clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

from ...conf.sampling import SamplingParams
from ...conf.workloads import WorkloadConfig
from ..core.request import Request
from ..core.work_item import WorkItem
from ..pipeline.protocol import PipelineError
from .clients import Clients
from .coordinator import Coordinator, TokenEvent

_LONGEST_WAIT_S = 1.0


def make_request(
    number: int, item: WorkItem, arrival: float, max_model_len: int, cache_block: int | None = None
) -> Request:
    """Make the request for a workload item, with greedy sampling and exactly the item's output length.

    Args:
        number: the request's number.
        item: the prompt, output length, user, priority and deadline.
        arrival: seconds on the coordinator's clock.
        max_model_len: most tokens that the request may have.
        cache_block: tokens per KV block, to hash a simulated prompt for the prefix cache; None: no hashes.
    """
    hashes: list[bytes] = []
    if item.prefix is not None and cache_block is not None:
        hashes = item.prefix.block_hashes(len(item.prompt), cache_block)
    return Request(
        number,
        item.prompt,
        exactly(item.output_len),
        arrival=arrival,
        max_model_len=max_model_len,
        user=item.user,
        priority=item.priority,
        deadline=None if item.deadline is None else arrival + item.deadline,
        block_hashes=hashes,
    )


@lru_cache(maxsize=8192)
def exactly(num_tokens: int) -> SamplingParams:
    """Return the parameters that sample exactly `num_tokens` tokens greedily; requests of one length share them."""
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True)


def replay(
    coordinator: Coordinator,
    items: Iterable[WorkItem],
    make_request: Callable[[WorkItem, float], Request],
    workload: WorkloadConfig | None = None,
) -> Iterator[list[TokenEvent]]:
    """Run all items to completion; yield the tokens of each micro-batch as they arrive.

    A request's arrival time is when it is due, even if the coordinator sees it later. Items that arrive at the start
    are made before the clock starts. Closing the iterator early aborts unfinished requests.

    Args:
        coordinator: coordinator of the pipeline that serves them.
        items: in order of arrival.
        make_request: makes the request for an item and its arrival time, in seconds on the coordinator's clock.
        workload: passed to `Clients`, for its closed loop and its duration.

    Raises:
        PipelineError: the pipeline failed, a request was lost or ended early, or the scheduler stalled.
    """
    arrivals = _Arrivals(coordinator, items, make_request, workload)
    try:
        while arrivals.clients.due < math.inf or arrivals.unfinished:
            events = coordinator.step(arrivals.deadline, arrivals.admit)
            for event in events:
                if event.is_last:
                    arrivals.finished(event.request)
            if arrivals.unfinished and not coordinator.has_work:
                raise PipelineError(f"{len(arrivals.unfinished)} requests were lost")
            if arrivals.clients.due == math.inf:
                coordinator.check_progress()
            yield events
    finally:
        for request in arrivals.unfinished.values():
            coordinator.abort(request)


class _Arrivals:
    """The clients that send the items, and the unfinished requests."""

    def __init__(
        self,
        coordinator: Coordinator,
        items: Iterable[WorkItem],
        make_request: Callable[[WorkItem, float], Request],
        workload: WorkloadConfig | None,
    ) -> None:
        self._coordinator = coordinator
        self._make = make_request
        self.unfinished: dict[int, Request] = {}
        rest = iter(items)
        ahead: list[WorkItem] = []  # made before the clock starts: all that arrive at once, and the next
        most = math.inf if workload is None or workload.max_concurrency is None else workload.max_concurrency
        for item in rest:
            ahead.append(item)
            if item.arrival > 0 or len(ahead) > most:
                break
        self.clients = Clients(_chain(ahead, rest), workload, coordinator.clock.now())

    @property
    def deadline(self) -> float:
        """The time until which the coordinator may wait for results: at most until the next arrival."""
        return min(self._coordinator.clock.now() + _LONGEST_WAIT_S, self.clients.due)

    def admit(self) -> None:
        """Add the requests that are due to the coordinator."""
        now = self._coordinator.clock.now()
        if self.clients.due == math.inf:  # a request may have finished whose event is not out yet
            for request in [request for request in self.unfinished.values() if request.is_finished]:
                self.finished(request)
        while (due := self.clients.due) <= now:
            request = self._make(self.clients.take(), due)
            self.unfinished[request.id] = request
            self._coordinator.add(request)

    def finished(self, request: Request) -> None:
        """Handle the end of a request. Further calls for it do nothing."""
        if self.unfinished.pop(request.id, None) is None:
            return
        if request.finish_reason == "error":
            raise PipelineError(f"request {request.id}: the model's logits are not finite; check the weights")
        if request.num_output != request.params.max_tokens:
            raise PipelineError(
                f"request {request.id} ended ({request.finish_reason}) after {request.num_output} of "
                f"{request.params.max_tokens} tokens"
            )
        assert request.record.finished is not None
        self.clients.answered(request.record.finished)


def _chain(ahead: list[WorkItem], rest: Iterator[WorkItem]) -> Iterator[WorkItem]:
    """Yield `ahead`, dropping each item once yielded, then `rest`."""
    ahead.reverse()
    while ahead:
        yield ahead.pop()
    yield from rest
