"""The summary of a run whose record is counted and dropped piece by piece: millions of requests in bounded memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...conf.workloads import SloConfig
from ..core.micro_batch_columns import Floats
from ..core.request_record import RequestRecord
from ..core.run_record import MicroBatchRecord, RunRecord
from .causes import CAUSES, Cause
from .latencies import NOT_COMPLETED, latencies, statistics
from .ledger import Ledger
from .quantiles import Quantiles
from .slo import has_bound, meets
from .summary import Totals


class RunningTotals:
    """Counts the part of a run that is over and drops it from the record.

    The cause of a gap may lie as many micro-batches back as were in flight. That many stay in the record; they are not
    counted again with the next part. The summary is that of the whole run. It is exact but for the quantiles of
    inter-token latencies and of prediction errors, which are within 0.1%.

    Args:
        depth: micro-batches in flight at once.
        slo: with bounds, the requests that met it are counted.
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
        self._micro_batches = self._tokens = self._decodes = self._drafts = self._accepted = 0
        self._peak_kv = 0.0
        self._bubbles: dict[int, float] = {}  # by unfinished request
        self._errors = Quantiles()
        self._gaps = Quantiles()
        self._latency: dict[str, list[Floats]] = {"ttft": [], "tpot": [], "e2el": [], "bubble": []}
        self._completed = self._failed = self._tokens_in = self._tokens_out = self._preemptions = self._met_slo = 0
        self._notes: list[str] = []

    def take(self, record: RunRecord) -> None:
        """Count the completed micro-batches and the ended requests of `record`, and drop them from it."""
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
        """The contents of `summary.json` for the whole run. Counts what is left in `record` first; call it once."""
        self.take(record)
        self._take_requests(record.requests)
        if self._start == math.inf:
            self._start = self._end = 0.0
        seconds = self._seconds.copy()
        seconds[Cause.FILL_DRAIN.code] += sum(self._end - end for end in self._ends)
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
            input_tokens=self._tokens_in,
            output_tokens=self._tokens_out,
            latency={"ttft": rows["ttft"], "tpot": rows["tpot"], "itl": self._gaps.statistics(), "e2el": rows["e2el"]},
            idle=dict(zip(CAUSES, seconds.tolist(), strict=True)),
            busy=self._busy.tolist() or [0.0] * record.num_stages,
            span=self._end - self._start,
            median_bubble=float(np.median(bubbles)) if len(bubbles) else 0.0,
            micro_batches=self._micro_batches,
            tokens=self._tokens,
            decodes=self._decodes,
            drafts=self._drafts,
            accepted=self._accepted,
            cv_stage_time=float(variation.mean()) if len(variation) else 0.0,
            batch=record.batch,
            depth=record.depth,
            peak_kv_fraction=self._peak_kv / record.num_blocks if record.num_blocks else 0.0,
            preemptions=self._preemptions,
            prediction_error=self._prediction_error,
            notes=self._notes,
            met_slo=self._met_slo if self._slo is not None else None,
        ).summary()

    @property
    def _prediction_error(self) -> dict[str, float] | None:
        errors = self._errors
        return {"median": errors.quantile(0.5), "p90": errors.quantile(0.9)} if errors.count else None

    def _take_micro_batches(self, record: RunRecord, micro_batches: list[MicroBatchRecord]) -> None:
        last = micro_batches[-1].micro_batch
        spans = [span for span in record.spans if span.micro_batch <= last]
        is_first = self._start == math.inf
        requests = record.requests if is_first else []  # the first arrival is the run's start
        ledger = Ledger(RunRecord(record.num_stages, record.num_blocks, micro_batches, spans, requests))
        if is_first:
            self._start = ledger.t0
            self._busy, self._squares = np.zeros(record.num_stages), np.zeros(record.num_stages)
        self._end = ledger.t1
        first, new = self._counted, micro_batches[self._counted :]
        self._ends = [float(lane.end[-1]) for lane in ledger.lanes]
        by_micro_batch = np.zeros(len(micro_batches))
        for stage, (lane, idle) in enumerate(zip(ledger.lanes, ledger.idle_columns, strict=True)):
            assert len(lane.micro_batch) == len(micro_batches), "a stage has not computed what the last one has"
            is_new = idle.place >= first
            seconds, cause, place = idle.seconds[is_new], idle.cause[is_new], idle.place[is_new]
            self._seconds += np.bincount(cause, weights=seconds, minlength=len(CAUSES))
            inner = cause != Cause.FILL_DRAIN.code
            by_micro_batch += np.bincount(place[inner], weights=seconds[inner], minlength=len(micro_batches))
            times = lane.seconds[first:]
            self._busy[stage] += times.sum()
            self._squares[stage] += np.square(times).sum()
            predicted = np.array([m.predicted[stage] if m.predicted else math.nan for m in new])
            known = np.isfinite(predicted) & (times > 0)
            self._errors.add(np.abs(predicted[known] / times[known] - 1.0))
        by_micro_batch[:first] = 0.0
        for request, bubble in ledger.micro_batches.by_request(by_micro_batch).items():
            self._bubbles[request] = self._bubbles.get(request, 0.0) + bubble
        self._micro_batches += len(new)
        self._tokens += int(ledger.micro_batches.tokens[first:].sum())
        drafts = sum(m.drafts for m in new)
        self._decodes += int(ledger.micro_batches.decodes[first:].sum()) - drafts
        self._drafts += drafts
        self._accepted += sum(m.accepted for m in new)
        self._peak_kv = max(self._peak_kv, *(micro_batch.kv_blocks_used for micro_batch in new))

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
            self._met_slo += sum(meets(request, self._slo) for request in done)
