"""Metrics of `/metrics`: vLLM's names with the prefix `gapless:`, and the ledger's seconds by stage and cause."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ...runtime.core.run_record import FaultReason
from ...runtime.serving.messages import TOKEN_BOUNDS, Snapshot

_TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_ITL_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_E2E_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)


Labels = dict[str, str]
_Kind = GaugeMetricFamily | CounterMetricFamily
IdleByCause = Callable[[Snapshot, float], Sequence[Mapping[str, float]]]  # by stage, until a time
_Read = Callable[[Snapshot], Mapping[Any, float]]  # a snapshot's values, by the values of a label
_METHODS = ("GET", "HEAD", "OPTIONS", "POST", "-")


class Metrics(Collector):
    """Counts requests and tokens as seen by the front. Engine metrics come from `snapshots`.

    Attributes:
        snapshots: the newest snapshot of each replica.
        ready: whether each replica accepts requests.
        idle_by_cause: splits the idle seconds of a snapshot; None if nothing observes the engine.
    """

    def __init__(self, model_name: str, num_blocks: int) -> None:
        self.registry = CollectorRegistry()
        self.snapshots: dict[int, Snapshot] = {}
        self.ready: dict[int, bool] = {}
        self._model_name = model_name
        self.num_blocks = num_blocks
        self.idle_by_cause: IdleByCause | None = None
        self._shown: dict[tuple[str, int, str], float] = {}  # idle seconds, which never fall

        def counter(name: str, text: str) -> Counter:
            return Counter(f"gapless:{name}", text, ("model_name",), registry=self.registry).labels(model_name)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(f"gapless:{name}", text, ("model_name",), buckets=buckets, registry=self.registry)
            return metric.labels(model_name)

        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of accepted requests.")
        self._generation_tokens = counter("generation_tokens", "Sampled tokens.")
        self._answers = Counter(
            "gapless:http_requests",
            "HTTP responses by status; 499: the client disconnected.",
            ("model_name", "method", "path", "status"),
            registry=self.registry,
        )
        self._of_key = {
            name: Counter(f"gapless:key_{name}", text, ("model_name", "key"), registry=self.registry)
            for name, text in (
                ("requests", "Generation requests by name of the API key."),
                ("prompt_tokens", "Prompt tokens by name of the API key."),
                ("generation_tokens", "Output tokens by name of the API key."),
            )
        }
        self._success = Counter(
            "gapless:request_success",
            "Finished requests by finish reason.",
            ("model_name", "finished_reason"),
            registry=self.registry,
        )
        self._ttft = histogram("time_to_first_token_seconds", "Seconds from arrival to the first token.", _TTFT_S)
        self._itl = histogram("inter_token_latency_seconds", "Seconds between tokens of a request.", _ITL_S)
        self._e2e = histogram("e2e_request_latency_seconds", "Seconds from arrival to the end of a request.", _E2E_S)
        self._queue = histogram("request_queue_time_seconds", "Seconds from arrival to the first dispatch.", _E2E_S)
        self._prefill = histogram(
            "request_prefill_time_seconds", "Seconds from the first dispatch to the first token.", _E2E_S
        )
        self._decode = histogram("request_decode_time_seconds", "Seconds from the first to the last token.", _E2E_S)
        self.longest_stall = 0.0  # longest block of the event loop, in seconds
        self.longest_own_stall = 0.0  # the same, without time in which its thread was descheduled
        self.registry.register(self)

    def answered(self, method: str, path: str, status: int) -> None:
        """Count an answer. `path` is the path template."""
        self._answers.labels(self._model_name, method if method in _METHODS else "other", path, str(status)).inc()

    def used(self, key: str, prompt_tokens: int, generation_tokens: int) -> None:
        """Count the usage of one request by an API key."""
        used = {"requests": 1, "prompt_tokens": prompt_tokens, "generation_tokens": generation_tokens}
        for name, value in used.items():
            self._of_key[name].labels(self._model_name, key).inc(value)

    def accepted(self, prompt_tokens: int, requests: int) -> None:
        """Count a prompt that was sent to the engine for `requests` outputs."""
        self._prompt_tokens.inc(prompt_tokens * requests)

    def first_token(self, arrival: float, dispatched: float | None, at: float) -> None:
        """Count a request's first token, given the times of arrival, first dispatch and the token itself."""
        self._generation_tokens.inc()
        self._ttft.observe(at - arrival)
        if dispatched is not None:
            self._queue.observe(dispatched - arrival)
            self._prefill.observe(at - dispatched)

    def next_token(self, seconds: float) -> None:
        """Count a token that arrived `seconds` after the previous one."""
        self._generation_tokens.inc()
        self._itl.observe(seconds)

    def ended(self, reason: str, seconds: float, decoding: float | None) -> None:
        """Count a finished request: seconds since arrival, and from the first to the last token, if any."""
        self._success.labels(self._model_name, reason).inc()
        self._e2e.observe(seconds)
        if decoding is not None:
            self._decode.observe(decoding)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the front and of the newest snapshots; called by prometheus_client."""
        stalls = (("", self.longest_stall, ""), ("own_", self.longest_own_stall, " by its own work"))
        for name, seconds, why in stalls:
            text = f"Longest time for which the front end's event loop was blocked{why}, in seconds."
            yield self._family(GaugeMetricFamily, f"front_longest_{name}stall_seconds", text, [({}, seconds)])
        ready = [({"replica": str(replica)}, is_ready) for replica, is_ready in self.ready.items()]
        yield self._family(GaugeMetricFamily, "replica_ready", "1 while the replica accepts requests, else 0.", ready)
        if self.snapshots:
            for metric in _OF_ENGINE:
                yield self._of_engines(*metric)
            usage, used = "KV cache usage, from 0 to 1.", self.snapshots.items()
            shares = (({"replica": str(each)}, found.kv_blocks_used / self.num_blocks) for each, found in used)
            yield self._family(GaugeMetricFamily, "kv_cache_usage_perc", usage, shares)
            if self.idle_by_cause is not None:
                yield self._idle(self.idle_by_cause)
            yield self._shares("mfu", "MFU of a stage: share of the GEMM rate of its ranks, by phase.")
            text = "Share of the memory bandwidth of its ranks that a stage uses while it computes, by phase."
            yield self._shares("bandwidth_share", text)
            yield self._micro_batches()

    def _family(self, kind: type[_Kind], name: str, text: str, rows: Iterable[tuple[Labels, float]]) -> Metric:
        """Build a metric from labelled values."""
        values = list(rows)
        names = list(values[0][0]) if values else []
        family = kind(f"gapless:{name}", text, labels=["model_name", *names])
        for labels, value in values:
            family.add_metric([self._model_name, *labels.values()], value)
        return family

    def _of_engines(self, kind: type[_Kind], name: str, text: str, label: str, read: _Read) -> Metric:
        """Build a metric from the newest snapshot of each replica, with an optional extra label."""
        rows = (
            ({"replica": str(replica)} | ({label: str(key)} if label else {}), value)
            for replica, found in self.snapshots.items()
            for key, value in read(found).items()
        )
        return self._family(kind, name, text, rows)

    def _idle(self, by_cause: IdleByCause) -> Metric:
        rows: list[tuple[Labels, float]] = []
        for replica, found in self.snapshots.items():
            for stage, lost in enumerate(by_cause(found, time.monotonic())):
                for cause, value in lost.items():
                    key = str(replica), stage, cause
                    self._shown[key] = max(value, self._shown.get(key, 0.0))
                    labels = {"replica": str(replica), "stage": str(stage), "cause": cause}
                    rows.append((labels, self._shown[key]))
        text = "Idle seconds of a stage, by the ledger's cause."
        return self._family(CounterMetricFamily, "stage_idle_seconds", text, rows)

    def _shares(self, name: str, text: str) -> Metric:
        """Build a metric from a field of `ComputeShare`, if the machine's peak rates are known."""
        rows = (
            ({"replica": str(replica), "stage": str(each.stage), "phase": each.phase}, float(getattr(each, name)))
            for replica, found in self.snapshots.items()
            for each in found.compute
        )
        return self._family(GaugeMetricFamily, f"stage_{name}", text, rows)

    def _micro_batches(self) -> Metric:
        text, labels = "Tokens per micro-batch, of prompts and decodes.", ["model_name", "replica"]
        family = HistogramMetricFamily("gapless:iteration_tokens_total", text, labels=labels)
        bounds = [*(str(float(bound)) for bound in TOKEN_BOUNDS), "+Inf"]
        for replica, found in self.snapshots.items():
            if not found.by_tokens:  # nothing observes the engine
                continue
            buckets = list(zip(bounds, accumulate(found.by_tokens), strict=True))
            family.add_metric([self._model_name, str(replica)], buckets, found.tokens)
        return family


def _slowdown(found: Snapshot) -> Mapping[Any, float]:
    slow = {each.stage: each.slowdown for each in found.slow}
    return {stage: slow.get(stage, 1.0) for stage in range(len(found.slow_seconds))}


def _waiting(found: Snapshot) -> Mapping[Any, float]:
    is_short = found.is_short_of_kv
    return {"kv_full": found.waiting if is_short else 0, "slots": 0 if is_short else found.waiting}


_GAUGE, _COUNTER = GaugeMetricFamily, CounterMetricFamily
_OF_ENGINE: tuple[tuple[type[_Kind], str, str, str, _Read], ...] = (  # kind, name, text, label, and values by it
    (_GAUGE, "num_requests_running", "Running requests, which have KV blocks.", "", lambda s: {"": s.running}),
    (_GAUGE, "num_requests_waiting", "Requests waiting for admission.", "", lambda s: {"": s.waiting}),
    (_GAUGE, "num_requests_waiting_by_reason", "Requests waiting for admission, by what they wait for.", "reason",
     _waiting),
    (_COUNTER, "num_preemptions", "Preemptions of finished requests.", "", lambda s: {"": s.preemptions}),
    (_COUNTER, "prefix_cache_queries", "Prompt tokens of admitted requests.", "", lambda s: {"": s.prefix_queries}),
    (_COUNTER, "prefix_cache_hits", "Prompt tokens found in the prefix cache.", "",
     lambda s: {"": s.prefix_hits}),
    (_GAUGE, "pipeline_epoch", "Epoch of the pipeline; a fault starts the next.", "", lambda s: {"": s.recovery.epoch}),
    (_COUNTER, "recoveries", "Recoveries from faults, by reason of the fault.", "reason",
     lambda s: {reason: s.recovery.repaired.get(reason, 0) for reason in get_args(FaultReason)}),
    (_COUNTER, "recovery_seconds", "Seconds of recoveries, by phase.", "part",
     lambda s: {"detect": 0.0, **s.recovery.seconds}),
    (_COUNTER, "stage_busy_seconds", "Compute seconds of a stage.", "stage", lambda s: dict(enumerate(s.busy))),
    (_GAUGE, "stage_slowdown", "Slowdown of a stage compared with its usual time while it is a straggler, else 1.",
     "stage", _slowdown),
    (_COUNTER, "stage_slow_seconds", "Seconds during which a stage was a straggler.", "stage",
     lambda s: dict(enumerate(s.slow_seconds))),
)  # fmt: skip
