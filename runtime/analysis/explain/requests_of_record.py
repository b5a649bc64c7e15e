"""The requests of a run, from its record: lengths, arrivals, users, and what the prefix cache knew of each prompt."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from msgspec import structs

from ...conf.workloads import WorkloadConfig
from ..core.numbers import counted
from ..core.request_record import RequestRecord
from ..core.run_record import FaultRecord, RunRecord
from ..workload import WorkItem
from ..workload.prefix_ids import PrefixIds

_ROUNDING = 1e-9  # seconds by which times of one moment may differ
_LET_IN = 0.02  # most seconds from the end of a request until the one that it held back is let in


@dataclass(slots=True)
class RequestsOfRecord:
    """The requests of a run in the order of their arrival, and what is not as it was, a line each."""

    items: list[WorkItem]
    notes: list[str] = field(default_factory=list)


def requests_of(
    record: RunRecord, workload: WorkloadConfig | None, block_size: int, *, without_faults: bool = False
) -> RequestsOfRecord:
    """Return the requests of a run, with prompts of zeros.

    Each gets as many tokens as it got in the run. Arrivals are seconds from the run's start. A prompt that the prefix
    cache knew in part begins like an earlier one.

    Args:
        record: of the run.
        workload: of the run's config, for its users, deadline and closed loop; None: it has none.
        block_size: tokens of a KV block.
        without_faults: arrivals leave out the seconds for which the pipeline had failed.
    """
    notes: list[str] = []
    served = [request for request in record.requests if request.token_times]
    if lost := len(record.requests) - len(served):
        notes.append(f"{counted(lost, 'request')} left out: no token came")
    if cut := sum(request.finish_reason in (None, "abort", "error") for request in served):
        notes.append(f"{counted(cut, 'request')} cut off in the run, and replayed with the tokens that came")
    served.sort(key=lambda request: (request.arrival, request.request))
    known = {request.request for request in record.requests}
    crossing = _crossing(record, known)
    if crossing:
        count = counted(len(crossing), "request")
        notes.append(f"{count} replayed only as far as the recorded window goes, without earlier context")
    start = record.start
    arrivals = _arrivals(served, workload)
    if record.faults and without_faults:
        arrivals = [at - _down_before(record.faults, at) for at in arrivals]
        notes.append(f"{counted(len(record.faults), 'fault')} left out, with the time lost and what was computed again")
    prefixes = _prefixes(served, _cached(record), block_size)
    users = workload.users if workload is not None else 1
    deadline = None
    if workload is not None and workload.deadline_ms is not None:
        deadline = workload.deadline_ms / 1e3
    numbers = {request.request: place for place, request in enumerate(sorted(served, key=lambda r: r.request))}
    items = [
        WorkItem(
            bytes(request.prompt_tokens),
            request.output_tokens,
            at - start,
            f"user-{numbers[request.request] % users}" if users > 1 else "",
            deadline,
            prefixes.get(request.request),
            request.priority,
        )
        for request, at in zip(served, arrivals, strict=True)
    ]
    if crossing:
        crossing = [structs.replace(item, arrival=item.arrival - start) for item in crossing]
        items = sorted([*items, *crossing], key=lambda item: item.arrival)
    return RequestsOfRecord(items, notes)


def _arrivals(served: Sequence[RequestRecord], workload: WorkloadConfig | None) -> list[float]:
    """Return when each request was due.

    A request of a closed loop that was held back is recorded when it was let in, right after another one had ended and
    its client had thought. It was due when the one before it was, at the earliest, and that is taken.
    """
    if workload is None or workload.max_concurrency is None:
        return [request.arrival for request in served]
    due: list[float] = []
    ends: list[float] = []
    for number, request in enumerate(served):
        at = request.arrival
        answered = at - workload.think_ms / 1e3
        last = bisect_right(ends, answered + _ROUNDING)  # of those that had ended, after the one that made room
        was_full = last > 0 and number - bisect_left(ends, ends[last - 1]) >= workload.max_concurrency
        was_held = was_full and answered - ends[last - 1] <= _LET_IN
        due.append(due[-1] if was_held else at)
        insort(ends, request.finished if request.finished is not None else float("inf"))
    return due


def _down_before(faults: Sequence[FaultRecord], at: float) -> float:
    """Return the seconds before `at` in which the pipeline had failed."""
    ends = [(fault.since, at if fault.up is None else fault.up) for fault in faults]
    return sum(max(0.0, min(at, up) - since) for since, up in ends)


def _cached(record: RunRecord) -> dict[int, int]:
    """Return how many tokens of each prompt came from the prefix cache: those before its first chunk."""
    found: dict[int, int] = {}
    for micro_batch in record.micro_batches:
        for chunk in micro_batch.chunks:
            found.setdefault(chunk.request, chunk.start)
    return found


def _prefixes(served: Sequence[RequestRecord], cached: Mapping[int, int], block_size: int) -> dict[int, PrefixIds]:
    """Return ids of the blocks of each prompt, by which the prefix cache finds as many tokens as it did in the run.

    The record says how many tokens each prompt had in the cache, but not of which request. They are taken to be those
    of the latest request before it that has as many.
    """
    if not any(cached.get(request.request) for request in served):
        return {}
    fresh = count()
    begun = sorted(served, key=lambda r: r.arrival if r.first_dispatched is None else r.first_dispatched)
    ids: dict[int, list[int]] = {}
    latest: list[tuple[int, list[int]]] = []  # blocks and ids, of requests whose prompts are in the cache
    waiting: list[tuple[float, int, list[int]]] = []  # the same of those that are not, by the time of the first token
    for request in begun:
        at = request.arrival if request.first_dispatched is None else request.first_dispatched
        for _, blocks, own in [entry for entry in waiting if entry[0] <= at]:
            latest.append((blocks, own))
        waiting = [entry for entry in waiting if entry[0] > at]
        wanted = cached.get(request.request, 0) // block_size
        found: list[int] = []
        if wanted:
            found = next((own for blocks, own in reversed(latest) if blocks >= wanted), [])
            found = found or max((own for _, own in latest), key=len, default=[])
        whole = request.prompt_tokens // block_size
        own = found[:wanted]
        own = own + [next(fresh) for _ in range(whole - len(own))]
        ids[request.request] = own
        waiting.append((request.token_times[0], whole, own))
    return {number: PrefixIds(own, block_size) for number, own in ids.items()}


def _crossing(record: RunRecord, known: set[int]) -> list[WorkItem]:
    """Return the requests of a window's micro-batches that its record does not hold, as far as the window does."""
    prompts: defaultdict[int, int] = defaultdict(int)
    tokens: defaultdict[int, int] = defaultdict(int)
    first: dict[int, float] = {}
    for micro_batch in record.micro_batches:
        for chunk in micro_batch.chunks:
            if chunk.request not in known:
                first.setdefault(chunk.request, micro_batch.dispatched)
                prompts[chunk.request] += chunk.tokens
        for number in micro_batch.decodes.requests:
            if number not in known:
                first.setdefault(number, micro_batch.dispatched)
                tokens[number] += 1
    return [WorkItem(bytes(max(1, prompts[number])), max(1, tokens[number]), at) for number, at in first.items()]
