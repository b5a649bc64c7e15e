"""Replicas taken together: what they come to, on one clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...conf.workloads import SloConfig
from ..core.run_record import RunRecord
from .causes import CAUSES, Cause
from .ledger import Ledger, inner_bubble_fraction
from .summary import totals


class Fleet:
    """Pipelines that served one workload side by side, each with its record and its ledger; one alone is a fleet too.

    A fleet's span is from its first request to its last compute. What a replica is idle of it before its own first
    request and after its last micro-batch is `fill_drain`, so busy time plus the seconds of all causes is the span for
    each stage of each replica. Stages are numbered through: those of replica 0, then those of replica 1.

    Args:
        records: of the replicas, all with as many stages; those without a request too.
        starts: seconds from the fleet's start to each replica's own (its first request); None where the records' times
            are on one clock.
    """

    def __init__(self, records: Sequence[RunRecord], starts: Sequence[float] | None = None) -> None:
        assert records
        assert len({record.num_stages for record in records}) == 1, "replicas of different depth"
        self.records = list(records)
        self.ledgers = [Ledger(record) for record in records]
        if starts is None:
            used = [bool(record.requests) for record in records]
            first = min((ledger.t0 for ledger, is_used in zip(self.ledgers, used, strict=True) if is_used), default=0.0)
            starts = [ledger.t0 - first if is_used else 0.0 for ledger, is_used in zip(self.ledgers, used, strict=True)]
        self.starts = list(starts)
        self.span_seconds = max(s + ledger.span_seconds for s, ledger in zip(self.starts, self.ledgers, strict=True))

    @property
    def pp(self) -> int:
        """Stages of each replica."""
        return self.records[0].num_stages

    @property
    def num_stages(self) -> int:
        return self.pp * len(self.records)

    def stage_name(self, stage: int) -> str:
        """`stage 3`, and of several replicas `replica 2` or `2: stage 3`."""
        replica, own = divmod(stage, self.pp)
        if len(self.records) == 1:
            return f"stage {own}"
        return f"replica {replica}" if self.pp == 1 else f"{replica}: stage {own}"

    @property
    def stage_seconds(self) -> float:
        """The span times the stages of all replicas."""
        return self.span_seconds * self.num_stages

    def busy_seconds(self, stage: int | None = None) -> float:
        """Compute seconds of a stage, or of all."""
        if stage is None:
            return sum(ledger.busy_seconds() for ledger in self.ledgers)
        replica, own = divmod(stage, self.pp)
        return self.ledgers[replica].busy_seconds(own)

    def seconds_by_cause(self, stage: int | None = None) -> dict[Cause, float]:
        """Idle seconds of a stage, or of all, for every cause."""
        if stage is None:
            each = [self.seconds_by_cause(number) for number in range(self.num_stages)]
            return {cause: sum(seconds[cause] for seconds in each) for cause in CAUSES}
        replica, own = divmod(stage, self.pp)
        ledger = self.ledgers[replica]
        seconds = ledger.seconds_by_cause(own)
        seconds[Cause.FILL_DRAIN] += self.span_seconds - ledger.span_seconds
        return seconds

    @property
    def bubble_fraction_inner(self) -> float:
        """Idle over total stage-seconds, without starved and fill_drain above and below the line."""
        return inner_bubble_fraction(self.seconds_by_cause(), self.stage_seconds)

    @property
    def notes(self) -> list[str]:
        """What the schedulers noted, each once."""
        return list(dict.fromkeys(note for record in self.records for note in record.notes))

    def check(self) -> None:
        """Conservation of each replica's ledger, and of the fleet's span on each stage."""
        for ledger in self.ledgers:
            ledger.check()
        for stage in range(self.num_stages):
            accounted = self.busy_seconds(stage) + sum(self.seconds_by_cause(stage).values())
            assert abs(accounted - self.span_seconds) <= 1e-6 * self.span_seconds + 1e-9, (stage, accounted)

    def summarize(self, slo: SloConfig | None = None) -> dict[str, Any]:
        """What `summary.json` holds of them all: requests, tokens and latencies over all, throughput over the fleet's
        duration, seconds summed over all stages; `replicas`, and how many requests each of them had."""
        summary = totals(
            list(zip(self.records, self.ledgers, strict=True)),
            duration=max(start + self._last(n) for n, start in enumerate(self.starts)),
            seconds=self.seconds_by_cause(),
            busy=[self.busy_seconds(stage) for stage in range(self.num_stages)],
            span=self.span_seconds,
            notes=self.notes,
            slo=slo,
        ).summary()
        if len(self.records) > 1:
            summary |= {
                "replicas": len(self.records),
                "replica_starts": self.starts,
                "requests_per_replica": [len(record.requests) for record in self.records],
            }
        return summary

    def _last(self, replica: int) -> float:
        """Seconds from a replica's start to its last token or compute."""
        record, ledger = self.records[replica], self.ledgers[replica]
        tokens = [request.token_times[-1] for request in record.requests if request.token_times]
        return max([*tokens, ledger.t1]) - ledger.t0
