"""The summary of a run whose record is counted and discarded incrementally: millions of requests in bounded memory."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np

from ....conf.workloads import SloConfig
from ...core.latencies import NOT_COMPLETED, latencies, statistics
from ...core.micro_batch_columns import Floats
from ...core.request_record import RequestRecord
from ...core.run_record import RunRecord
from .causes import CAUSES, Cause
from .ledger import Ledger
from .predictions import predicted_and_measured, relative_errors
from .quantiles import Quantiles
from .recovery import down_seconds, fault_summary
from .running_ledger import RunningLedger, first_place
from .slo import has_bound, meets
from .summary import Totals, micro_batch_counts, request_counts


class RunningTotals:
    """Counts the finished part of a run and discards it from the record, except what the ledger still needs.

    The summary covers the whole run. It is exact except for the quantiles of inter-token latencies and of prediction
    errors, which are within 0.1%.

    Args:
        depth: maximum micro-batches in flight.
        slo: if it has bounds, the requests that met it are counted.
    """

    def __init__(self, depth: int, slo: SloConfig | None = None) -> None:
        self._ledger = RunningLedger(depth)
        self._slo = slo if slo is not None and has_bound(slo) else None
        self._last_token = -math.inf
        self._squares: Floats = np.zeros(0)  # of stage times
        self._computed: Floats = np.zeros(0)  # micro-batches, by stage
        none = np.zeros(0, np.int64)
        self._counts = Counter(request_counts([]) | micro_batch_counts([], none, none))  # by fields of `Totals`
        self._peak_kv = 0.0
        self._bubbles: dict[int, float] = {}  # by unfinished request
        self._errors = Quantiles()
        self._gaps = Quantiles()
        self._latency: dict[str, list[Floats]] = {"ttft": [], "tpot": [], "e2el": [], "bubble": []}
        self._met_slo = 0
        self._notes: list[str] = []

    def take(self, record: RunRecord) -> None:
        """Count the completed micro-batches and the finished requests of `record`, and discard them from it."""
        if (part := self._ledger.count(record)) is not None:
            self._take_micro_batches(record, *part)
        self._take_requests([request for request in record.requests if request.finished is not None])
        record.requests = [request for request in record.requests if request.finished is None]
        self._notes += record.notes
        record.notes = []
        self._ledger.drop(record)

    def summary(self, record: RunRecord) -> dict[str, Any]:
        """Return the contents of `summary.json` for the whole run.

        What is left in `record` is counted first; call this only once.
        """
        self.take(record)
        self._take_requests(record.requests)
        ran = self._ledger.start < math.inf
        start, end = (self._ledger.start, self._ledger.end) if ran else (0.0, 0.0)
        busy = self._ledger.busy if ran else np.zeros(record.num_stages)
        idle = self._ledger.idle.sum(axis=0) if ran else np.zeros(len(CAUSES))
        idle[Cause.FILL_DRAIN.code] += float((end - self._ledger.ends).sum())
        per_stage = np.maximum(1.0, self._computed if ran else np.zeros(record.num_stages))
        mean = busy / per_stage
        squares = self._squares if ran else np.zeros(record.num_stages)
        variance = np.maximum(0.0, squares / per_stage - mean**2)
        variation = np.sqrt(variance) / np.where(mean > 0, mean, 1.0)
        latency = {name: np.concatenate(values) if values else np.empty(0) for name, values in self._latency.items()}
        bubbles = latency.pop("bubble")
        rows = {name: statistics(values) for name, values in latency.items()}
        return Totals(
            **dict[str, Any](self._counts),
            duration=max(self._last_token, end) - start,
            latency={"ttft": rows["ttft"], "tpot": rows["tpot"], "itl": self._gaps.statistics(), "e2el": rows["e2el"]},
            idle=dict(zip(CAUSES, idle.tolist(), strict=True)),
            busy=busy.tolist(),
            span=end - start,
            median_bubble=float(np.median(bubbles)) if len(bubbles) else 0.0,
            cv_stage_time=float(variation.mean()) if len(variation) else 0.0,
            batch=record.batch,
            depth=record.depth,
            peak_kv_fraction=self._peak_kv / record.num_blocks if record.num_blocks else 0.0,
            prediction_error=self._prediction_error,
            faults=[fault_summary(fault, start) for fault in record.faults],
            recovery=down_seconds(record.faults, end),
            stragglers=None,
            compute=[share.summary() for share in self._ledger.compute.shares()],
            notes=self._notes,
            met_slo=self._met_slo if self._slo is not None else None,
        ).summary()

    @property
    def _prediction_error(self) -> dict[str, float] | None:
        errors = self._errors
        return {"median": errors.quantile(0.5), "p90": errors.quantile(0.9)} if errors.count else None

    def _take_micro_batches(self, record: RunRecord, ledger: Ledger, first: int) -> None:
        """Count the micro-batches of `ledger`, starting at index `first`."""
        new = record.micro_batches[first : len(ledger.micro_batches.micro_batch)]
        if not len(self._squares):
            self._squares, self._computed = np.zeros(record.num_stages), np.zeros(record.num_stages)
        for stage, lane in enumerate(ledger.lanes):
            times = lane.seconds[first_place(ledger, lane, first) :]
            self._squares[stage] += np.square(times).sum()
            self._computed[stage] += len(times)
        self._errors.add(relative_errors(predicted_and_measured(record, ledger, first)))
        for request, bubble in ledger.bubble_by_request(first).items():
            self._bubbles[request] = self._bubbles.get(request, 0.0) + bubble
        columns = ledger.micro_batches
        self._counts.update(micro_batch_counts(new, columns.tokens[first:], columns.decodes[first:]))
        self._peak_kv = max(self._peak_kv, *(micro_batch.kv_blocks_used for micro_batch in new))

    def _take_requests(self, ended: list[RequestRecord]) -> None:
        done = [request for request in ended if request.finish_reason not in NOT_COMPLETED]
        bubbles = {request.request: self._bubbles.pop(request.request, 0.0) for request in ended}
        self._counts.update(request_counts(ended))
        self._last_token = max([self._last_token, *(r.token_times[-1] for r in ended if r.token_times)])
        found = latencies(done)
        self._gaps.add(found.pop("itl"))
        for name, values in found.items():
            self._latency[name].append(values)
        self._latency["bubble"].append(np.array([bubbles[request.request] for request in done]))
        if self._slo is not None:
            self._met_slo += sum(meets(request, self._slo) for request in done)
