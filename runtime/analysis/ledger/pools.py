"""Joins the prefill and decode halves of each request of disaggregated pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...core.request_record import RequestRecord
from ...core.run_record import RunRecord
from .ledger import Ledger


@dataclass(frozen=True, slots=True)
class JoinedRequest:
    """A request over both pools.

    Attributes:
        record: the request's record, with the tokens of both pools. Times are seconds from the fleet's start.
        bubble: the request's bubble time in both pools.
        prefill: number of the replica that prefilled it.
        decode: number of the replica that decoded it; None if no replica did.
    """

    record: RequestRecord
    bubble: float
    prefill: int
    decode: int | None

    @property
    def kv_wait(self) -> float | None:
        """Seconds from its first token to the start of its KV transfer, waiting for decode-pool space and links."""
        moved = self.record.kv_transfer  # rounding may put its begin before the token
        return None if moved is None else max(0.0, moved[0] - self.record.token_times[0])

    @property
    def kv_transfer(self) -> float | None:
        """Duration of its KV transfer in seconds."""
        return None if self.record.kv_transfer is None else self.record.kv_transfer[1] - self.record.kv_transfer[0]


def join_pools(
    parts: Sequence[tuple[RunRecord, Ledger]], starts: Sequence[float], num_prefill: int
) -> list[JoinedRequest]:
    """Join the halves of each request, ordered by request number.

    Args:
        parts: the record and the ledger of each replica, the prefill pool first.
        starts: seconds from the fleet's start to each replica's own.
        num_prefill: number of replicas in the prefill pool.
    """
    halves = [
        {request.request: request for request in (_moved(each, start - ledger.t0) for each in record.requests)}
        for (record, ledger), start in zip(parts, starts, strict=True)
    ]
    decoded_by = {number: replica for replica in range(num_prefill, len(parts)) for number in halves[replica]}
    joined = []
    for replica in range(num_prefill):
        ledger = parts[replica][1]
        for number, first in halves[replica].items():
            decode, bubble = decoded_by.get(number), ledger.bubble_of_request(number)
            if decode is None:
                joined.append(JoinedRequest(first, bubble, replica, None))
                continue
            rest = halves[decode][number]
            record = replace(
                rest,
                prompt_tokens=first.prompt_tokens,
                arrival=first.arrival,
                token_times=[*first.token_times, *rest.token_times],
                first_dispatched=first.first_dispatched,
                preemptions=first.preemptions + rest.preemptions,
                cached_tokens=first.cached_tokens,
            )
            joined.append(JoinedRequest(record, bubble + parts[decode][1].bubble_of_request(number), replica, decode))
    return sorted(joined, key=lambda request: request.record.request)


def _moved(request: RequestRecord, by: float) -> RequestRecord:
    """Return a copy of the record with all times `by` seconds later."""
    dispatched, finished, moved = request.first_dispatched, request.finished, request.kv_transfer
    return replace(
        request,
        arrival=request.arrival + by,
        token_times=[time + by for time in request.token_times],
        first_dispatched=None if dispatched is None else dispatched + by,
        finished=None if finished is None else finished + by,
        kv_transfer=None if moved is None else (moved[0] + by, moved[1] + by),
    )
