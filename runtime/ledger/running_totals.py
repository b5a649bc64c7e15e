"""A run whose record is counted and let go piece by piece: millions of requests in bounded memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...conf.workloads import SloConfig
from ..core.micro_batch_columns import Floats
from ..core.request_record import RequestRecord
from ..core.run_record import MicroBatchRecord, RunRecord
from .causes import CAUSES, Cause
from .ledger import Ledger
from .summary import NOT_COMPLETED, Totals, has_bound, latencies, meets, statistics

_FILL = CAUSES.index(Cause.FILL_DRAIN)


class Quantiles:
    """Values above 0, as counts in bins `resolution` wide on a log scale: any quantile within half of that."""

    def __init__(self, resolution: float = 0.002, least: float = 1e-6, most: float = 1e12) -> None:
        self._least = math.log(least)
        self._width = math.log1p(resolution)
        self._counts = np.zeros(int((math.log(most) - self._least) / self._width) + 2, np.int64)
        self._sum = self._squares = 0.0

    def add(self, values: Floats) -> None:
        logs = np.log(np.maximum(values, 1e-300))
        bins = np.clip((logs - self._least) / self._width + 1, 0, len(self._counts) - 1).astype(np.int64)
        self._counts += np.bincount(bins, minlength=len(self._counts))
        self._sum += float(values.sum())
        self._squares += float(np.square(values).sum())

    @property
    def count(self) -> int:
        return int(self._counts.sum())

    def quantile(self, share: float) -> float:
        """0 of nothing."""
        if not self.count:
            return 0.0
        place = int(np.searchsorted(np.cumsum(self._counts), share * (self.count - 1), side="right"))
        return math.exp(self._least + (place - 0.5) * self._width) if place else 0.0

    @property
    def mean(self) -> float:
        return self._sum / self.count if self.count else 0.0

    @property
    def std(self) -> float:
        return math.sqrt(max(0.0, self._squares / self.count - self.mean**2)) if self.count else 0.0

    def statistics(self) -> dict[str, float]:
        """What a summary says of a latency."""
        return {"mean": self.mean, "median": self.quantile(0.5), "std": self.std, "p90": self.quantile(0.9),
                "p99": self.quantile(0.99)}  # fmt: skip


class RunningTotals:
    """Counts what of a run is over, and leaves in its record what is not.

    A gap belongs to the micro-batch that it comes before, and its cause may lie as many micro-batches back as were in
    flight, so that many stay in the record and are passed over when the next piece is counted. The summary is that of
    the whole run: exact but for quantiles of gaps between tokens and of prediction errors, which are within 0.1%.
    """

    def __init__(self, depth: int, slo: SloConfig | None = None) -> None:
        self._overlap = depth + 2
        self._slo = slo if slo is not None and has_bound(slo) else None
        self._counted = 0  # leading micro-batches of the record that have been counted
        self._start = math.inf
        self._end = self._last_token = -math.inf
        self._ends: list[float] = []  # by stage: of its last counted micro-batch
        self._seconds = np.zeros(len(CAUSES))
        self._busy: Floats = np.zeros(0)  # by stage
        self._squares: Floats = np.zeros(0)  # of stage times
        self._micro_batches = self._tokens = 0
        self._peak_kv = 0.0
        self._bubbles: dict[int, float] = {}  # by unfinished request
        self._errors = Quantiles()
        self._gaps = Quantiles()
        self._latency: dict[str, list[Floats]] = {"ttft": [], "tpot": [], "e2el": [], "bubble": []}
        self._completed = self._failed = self._tokens_in = self._tokens_out = self._preemptions = self._good = 0
        self._notes: list[str] = []

    def take(self, record: RunRecord) -> None:
        """Count the micro-batches that are completed and the requests that have ended, and drop them from `record`."""
        micro_batches = record.micro_batches
        done = next(
            (i for i, micro_batch in enumerate(micro_batches) if micro_batch.completed is None), len(micro_batches)
        )
        if done > self._counted:
            self._take_micro_batches(record, micro_batches[:done])
        self._take_requests([request for request in record.requests if request.finished is not None])
        record.requests = [request for request in record.requests if request.finished is None]
        self._notes += record.notes
        record.notes = []
        keep = max(0, done - self._overlap)
        if keep:
            first = micro_batches[keep].micro_batch if keep < len(micro_batches) else micro_batches[-1].micro_batch + 1
            record.micro_batches = micro_batches[keep:]
            record.spans = [span for span in record.spans if span.micro_batch >= first]
        self._counted = done - keep

    def summary(self, record: RunRecord) -> dict[str, Any]:
        """`summary.json` of the whole run; what is left in `record` is counted first. To be called once."""
        self.take(record)
        self._take_requests(record.requests)
        if self._start == math.inf:
            self._start = self._end = 0.0
        seconds = self._seconds.copy()
        seconds[_FILL] += sum(self._end - end for end in self._ends)
        per_stage = max(1, self._micro_batches)
        mean = self._busy / per_stage
        variance = np.maximum(0.0, self._squares / per_stage - mean**2)
        variation = np.sqrt(variance) / np.where(mean > 0, mean, 1.0)
        latency = {name: np.concatenate(values) if values else np.empty(0) for name, values in self._latency.items()}
        bubbles = latency.pop("bubble")
        rows = {name: statistics(values) for name, values in latency.items()}
        return Totals(
            duration=max(self._last_token, self._end) - self._start,
            completed=self._completed,
            failed=self._failed,
            tokens_in=self._tokens_in,
            tokens_out=self._tokens_out,
            latency={"ttft": rows["ttft"], "tpot": rows["tpot"], "itl": self._gaps.statistics(), "e2el": rows["e2el"]},
            seconds=dict(zip(CAUSES, seconds.tolist(), strict=True)),
            busy=self._busy.tolist() or [0.0] * record.num_stages,
            span=self._end - self._start,
            median_bubble=float(np.median(bubbles)) if len(bubbles) else 0.0,
            micro_batches=self._micro_batches,
            tokens=self._tokens,
            cv_stage_time=float(variation.mean()) if len(variation) else 0.0,
            peak_kv_fraction=self._peak_kv / record.num_blocks if record.num_blocks else 0.0,
            preemptions=self._preemptions,
            prediction_error=self._prediction_error,
            notes=self._notes,
            good=self._good if self._slo is not None else None,
        ).summary()

    @property
    def _prediction_error(self) -> dict[str, float] | None:
        found = self._errors
        return {"median": found.quantile(0.5), "p90": found.quantile(0.9)} if found.count else None

    def _take_micro_batches(self, record: RunRecord, micro_batches: list[MicroBatchRecord]) -> None:
        last = micro_batches[-1].micro_batch
        spans = [span for span in record.spans if span.micro_batch <= last]
        begins = self._start == math.inf
        requests = record.requests if begins else []  # the first arrival is the run's start
        ledger = Ledger(RunRecord(record.num_stages, record.num_blocks, micro_batches, spans, requests))
        if begins:
            self._start = ledger.t0
            self._busy, self._squares = np.zeros(record.num_stages), np.zeros(record.num_stages)
        self._end = ledger.t1
        first, fresh = self._counted, micro_batches[self._counted :]
        self._ends = [float(lane.end[-1]) for lane in ledger.lanes]
        by_micro_batch = np.zeros(len(micro_batches))
        for stage, (lane, idle) in enumerate(zip(ledger.lanes, ledger.idle_columns, strict=True)):
            assert len(lane.micro_batch) == len(micro_batches), "a stage has not computed what the last one has"
            mine = idle.place >= first
            seconds, cause, place = idle.seconds[mine], idle.cause[mine], idle.place[mine]
            self._seconds += np.bincount(cause, weights=seconds, minlength=len(CAUSES))
            inner = cause != _FILL
            by_micro_batch += np.bincount(place[inner], weights=seconds[inner], minlength=len(micro_batches))
            times = lane.seconds[first:]
            self._busy[stage] += times.sum()
            self._squares[stage] += np.square(times).sum()
            foreseen = np.array([m.predicted[stage] if m.predicted else math.nan for m in fresh])
            known = np.isfinite(foreseen) & (times > 0)
            self._errors.add(np.abs(foreseen[known] / times[known] - 1.0))
        by_micro_batch[:first] = 0.0
        for request, bubble in ledger.micro_batches.by_request(by_micro_batch).items():
            self._bubbles[request] = self._bubbles.get(request, 0.0) + bubble
        self._micro_batches += len(fresh)
        self._tokens += int(ledger.micro_batches.tokens[first:].sum())
        self._peak_kv = max(self._peak_kv, *(micro_batch.kv_blocks_used for micro_batch in fresh))

    def _take_requests(self, ended: list[RequestRecord]) -> None:
        done = [request for request in ended if request.finish_reason not in NOT_COMPLETED]
        bubbles = {request.request: self._bubbles.pop(request.request, 0.0) for request in ended}
        self._failed += len(ended) - len(done)
        self._completed += len(done)
        self._preemptions += sum(request.preemptions for request in ended)
        self._tokens_in += sum(request.prompt_tokens for request in done)
        self._tokens_out += sum(request.output_tokens for request in done)
        self._last_token = max([self._last_token, *(r.token_times[-1] for r in ended if r.token_times)])
        found = latencies(done)
        self._gaps.add(found.pop("itl"))
        for name, values in found.items():
            self._latency[name].append(values)
        self._latency["bubble"].append(np.array([bubbles[request.request] for request in done]))
        if self._slo is not None:
            self._good += sum(meets(request, self._slo) for request in done)
