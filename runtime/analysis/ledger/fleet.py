"""Aggregates the replicas that serve one workload, on one clock."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from ...core.request_record import RequestRecord
from ...core.run_record import RunRecord
from .causes import CAUSES, Cause
from .ledger import Ledger
from .pools import JoinedRequest, join_pools
from .stragglers import Straggler, find_stragglers


class Fleet:
    """Pipelines that served one workload in parallel, each with its record and its ledger. A fleet of one is a run.

    A fleet's span is from its first request to its last compute. A replica's idle time before its own first request and
    after its last micro-batch is `fill_drain`: for each stage of each replica, busy time plus the seconds of all causes
    is the span. Stages are numbered consecutively across replicas.

    With a prefill pool, each pool's records have one half of a request; request counts and latencies are over whole
    requests.

    Args:
        records: one per replica, including replicas that served no request.
        starts: seconds from the fleet's start to each replica's own (its first request); None if the times of all
            records are on one clock.
        num_prefill: how many of the replicas, the first ones, are the prefill pool; 0: each serves whole requests.
        ledgers: the records' ledgers, if already built.
    """

    def __init__(
        self,
        records: Sequence[RunRecord],
        starts: Sequence[float] | None = None,
        *,
        num_prefill: int = 0,
        ledgers: Sequence[Ledger] | None = None,
    ) -> None:
        assert records
        self.records = list(records)
        self.num_prefill = num_prefill
        self._places = [(replica, own) for replica, record in enumerate(records) for own in range(record.num_stages)]
        self.ledgers = [Ledger(record) for record in records] if ledgers is None else list(ledgers)
        if starts is None:
            used = [bool(record.requests) for record in records]
            first = min((ledger.t0 for ledger, is_used in zip(self.ledgers, used, strict=True) if is_used), default=0.0)
            starts = [ledger.t0 - first if is_used else 0.0 for ledger, is_used in zip(self.ledgers, used, strict=True)]
        self.starts = list(starts)
        self.span_seconds = max(s + ledger.span_seconds for s, ledger in zip(self.starts, self.ledgers, strict=True))

    @property
    def is_several(self) -> bool:
        """Whether it has more than one replica."""
        return len(self.records) > 1

    @property
    def parts(self) -> list[tuple[RunRecord, Ledger]]:
        """The record and the ledger of each replica."""
        return list(zip(self.records, self.ledgers, strict=True))

    @property
    def num_stages(self) -> int:
        """The number of stages of all pipelines together."""
        return len(self._places)

    def stage_name(self, stage: int) -> str:
        """Return the display name of a stage.

        It is `stage 3`; with several replicas, `replica 2` or `prefill 0` for a single-stage replica, else
        `2: stage 3`.
        """
        replica, own = self._places[stage]
        if not self.is_several:
            return f"stage {own}"
        name = self.replica_name(replica)
        return name if self.records[replica].num_stages == 1 else f"{name.removeprefix('replica ')}: stage {own}"

    def replica_name(self, replica: int) -> str:
        """Return `replica 2`, or with pools `prefill 0` or `decode 2`, numbered over both."""
        return replica_name(replica, self.num_prefill)

    @property
    def stage_seconds(self) -> float:
        """The span times the stages of all replicas."""
        return self.span_seconds * self.num_stages

    def busy_seconds(self, stage: int | None = None) -> float:
        """Return the compute seconds of a stage; None: of all stages."""
        if stage is None:
            return sum(ledger.busy_seconds() for ledger in self.ledgers)
        replica, own = self._places[stage]
        return self.ledgers[replica].busy_seconds(own)

    def seconds_by_cause(self, stage: int | None = None) -> dict[Cause, float]:
        """Return the idle seconds of a stage by cause; None: of all stages."""
        if stage is None:
            each = [self.seconds_by_cause(number) for number in range(self.num_stages)]
            return {cause: sum(seconds[cause] for seconds in each) for cause in CAUSES}
        replica, own = self._places[stage]
        ledger = self.ledgers[replica]
        seconds = ledger.seconds_by_cause(own)
        seconds[Cause.FILL_DRAIN] += self.span_seconds - ledger.span_seconds
        return seconds

    @cached_property
    def joined(self) -> list[JoinedRequest]:
        """The requests of both pools; empty without pools."""
        if not self.num_prefill:
            return []
        return join_pools(self.parts, self.starts, self.num_prefill)

    @property
    def served(self) -> list[tuple[RequestRecord, float]]:
        """Each request once, with its bubble time, including requests that cross the edges of a recorded window."""
        if self.num_prefill:
            return [(request.record, request.bubble) for request in self.joined]
        requests = [(r, ledger) for record, ledger in self.parts for r in (*record.requests, *record.crossing)]
        return [(request, ledger.bubble_of_request(request.request)) for request, ledger in requests]

    @property
    def notes(self) -> list[str]:
        """The schedulers' notes, each once."""
        return list(dict.fromkeys(note for record in self.records for note in record.notes))

    def check(self) -> None:
        """Assert conservation in each replica's ledger, and of the fleet's span on each stage."""
        for ledger in self.ledgers:
            ledger.check()
        for stage in range(self.num_stages):
            accounted = self.busy_seconds(stage) + sum(self.seconds_by_cause(stage).values())
            assert abs(accounted - self.span_seconds) <= 1e-6 * self.span_seconds + 1e-9, (stage, accounted)

    @cached_property
    def replicas(self) -> list[Fleet]:
        """Each replica as a standalone run."""
        return [Fleet([record], ledgers=[ledger]) for record, ledger in self.parts] if self.is_several else [self]

    @cached_property
    def stragglers(self) -> list[list[Straggler]]:
        """The stages of each replica that were slow for a while."""
        if self.is_several:
            return [replica.stragglers[0] for replica in self.replicas]
        return [find_stragglers(self.ledgers[0])]

    @property
    def duration(self) -> float:
        """Seconds from the first arrival to the last token or compute."""
        return max(start + self._last(number) for number, start in enumerate(self.starts))

    def _last(self, replica: int) -> float:
        """Return the seconds from a replica's start to its last token or compute."""
        record, ledger = self.records[replica], self.ledgers[replica]
        tokens = [request.token_times[-1] for request in record.requests if request.token_times]
        return max([*tokens, ledger.t1]) - ledger.t0


def replica_name(replica: int, num_prefill: int) -> str:
    """Return the name of a replica of a fleet whose first `num_prefill` replicas are a prefill pool."""
    if not num_prefill:
        return f"replica {replica}"
    return f"prefill {replica}" if replica < num_prefill else f"decode {replica}"
