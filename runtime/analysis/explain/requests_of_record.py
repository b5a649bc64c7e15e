"""The requests of a run, from its record: lengths, arrivals, users, and prefix-cache hits of each prompt."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import count

from msgspec import structs

from ....conf.workloads import WorkloadConfig
from ...core.numbers import counted
from ...core.prefix_ids import PrefixIds
from ...core.request_record import RequestRecord
from ...core.run_record import FaultRecord, RunRecord
from ...core.work_item import WorkItem

_ROUNDING = 1e-9  # seconds by which equal times may differ
_LET_IN = 0.02  # longest delay from the end of a request until the next held-back request is admitted, in seconds


def requests_of(
    record: RunRecord, workload: WorkloadConfig | None, block_size: int, *, without_faults: bool = False
) -> tuple[list[WorkItem], list[str]]:
    """Return the requests of a run, with prompts of zeros, and notes on what differs from the run, one line each.

    Each generates as many tokens as in the run. Arrivals are seconds from the run's start. A prompt with a prefix-cache
    hit shares its prefix with an earlier one.

    Args:
        record: the run's record.
        workload: the run's workload config, for users, deadline and closed loop; None: there is none.
        block_size: tokens per KV block.
        without_faults: remove the downtime of the pipeline from arrivals.
    """
    notes: list[str] = []
    served = [request for request in record.requests if request.token_times]
    if lost := len(record.requests) - len(served):
        notes.append(f"{counted(lost, 'request')} left out: no output token")
    if cut := sum(request.finish_reason in (None, "abort", "error") for request in served):
        notes.append(f"{counted(cut, 'request')} unfinished in the run, replayed up to the last token")
    served.sort(key=lambda request: (request.arrival, request.request))
    known = {request.request for request in record.requests}
    crossing = _crossing(record, known)
    if crossing:
        count = counted(len(crossing), "request")
        notes.append(f"{count} replayed only within the recorded window, without earlier context")
    start = record.start
    arrivals = _arrivals(served, workload)
    if record.faults and without_faults:
        arrivals = [at - _down_before(record.faults, at) for at in arrivals]
        notes.append(f"{counted(len(record.faults), 'fault')} left out, with downtime and recomputation")
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
    return items, notes


def _arrivals(served: Sequence[RequestRecord], workload: WorkloadConfig | None) -> list[float]:
    """Return when each request was due.

    A held-back request of a closed loop is recorded at its admission, right after another one had ended and its client
    had thought. It was due no earlier than the request before it, so that time is used.
    """
    if workload is None or workload.max_concurrency is None:
        return [request.arrival for request in served]
    due: list[float] = []
    ends: list[float] = []
    for number, request in enumerate(served):
        at = request.arrival
        answered = at - workload.think_ms / 1e3
        last = bisect_right(ends, answered + _ROUNDING)  # place after the request whose end made room
        was_full = last > 0 and number - bisect_left(ends, ends[last - 1]) >= workload.max_concurrency
        was_held = was_full and answered - ends[last - 1] <= _LET_IN
        due.append(due[-1] if was_held else at)
        insort(ends, request.finished if request.finished is not None else float("inf"))
    return due


def _down_before(faults: Sequence[FaultRecord], at: float) -> float:
    """Return the downtime of the pipeline before `at`, in seconds."""
    ends = [(fault.since, at if fault.up is None else fault.up) for fault in faults]
    return sum(max(0.0, min(at, up) - since) for since, up in ends)


def _cached(record: RunRecord) -> dict[int, int]:
    """Return the prefix-cache hits of each prompt in tokens: those before its first chunk."""
    found: dict[int, int] = {}
    for micro_batch in record.micro_batches:
        for chunk in micro_batch.chunks:
            found.setdefault(chunk.request, chunk.start)
    return found


def _prefixes(served: Sequence[RequestRecord], cached: Mapping[int, int], block_size: int) -> dict[int, PrefixIds]:
    """Return block ids for each prompt that reproduce the run's prefix-cache hits.

    The record has the length of each hit, but not the request that cached the blocks. The latest earlier request with
    enough blocks is assumed.
    """
    if not any(cached.get(request.request) for request in served):
        return {}
    fresh = count()
    begun = sorted(served, key=lambda r: r.arrival if r.first_dispatched is None else r.first_dispatched)
    ids: dict[int, list[int]] = {}
    latest: list[tuple[int, list[int]]] = []  # blocks and ids of requests whose prompts are in the cache
    waiting: list[tuple[float, int, list[int]]] = []  # of the others, with the time of their first token
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
    """Return the requests in a window's micro-batches that are missing from its record, as far as the window shows."""
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
