"""What `/metrics` says, under vLLM's names with the prefix `gapless:`, and the ledger's seconds by stage and cause."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import accumulate
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ...runtime.core.run_record import FaultReason
from ...runtime.ledger.causes import CAUSES, Cause
from ...runtime.serving.messages import TOKEN_BOUNDS, Snapshot

_TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_ITL_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_E2E_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)


_METHODS = ("GET", "HEAD", "OPTIONS", "POST", "-")


class Metrics(Collector):
    """Counts requests and tokens as the front sees them. What only the engines know is in `snapshots`.

    Attributes:
        snapshots: the newest of each replica.
        ready: whether each replica takes requests.
    """

    def __init__(self, model_name: str, num_blocks: int) -> None:
        self.registry = CollectorRegistry()
        self.snapshots: dict[int, Snapshot] = {}
        self.ready: dict[int, bool] = {}
        self._model_name = model_name
        self.num_blocks = num_blocks
        self._shown: dict[tuple[str, int, Cause], float] = {}  # idle seconds, which never fall

        def counter(name: str, text: str) -> Counter:
            return Counter(f"gapless:{name}", text, ("model_name",), registry=self.registry).labels(model_name)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(f"gapless:{name}", text, ("model_name",), buckets=buckets, registry=self.registry)
            return metric.labels(model_name)

        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of accepted requests.")
        self._generation_tokens = counter("generation_tokens", "Tokens that were sampled.")
        self._answers = Counter(
            "gapless:http_requests",
            "Answers to HTTP requests, by their status; 499: the client has left.",
            ("model_name", "method", "path", "status"),
            registry=self.registry,
        )
        self._of_key = {
            name: Counter(f"gapless:key_{name}", text, ("model_name", "key"), registry=self.registry)
            for name, text in (
                ("requests", "Requests for outputs, by the API key's name."),
                ("prompt_tokens", "Tokens of their prompts."),
                ("generation_tokens", "Tokens of their outputs."),
            )
        }
        self._success = Counter(
            "gapless:request_success",
            "Requests that ended, by their finish reason.",
            ("model_name", "finished_reason"),
            registry=self.registry,
        )
        self._ttft = histogram("time_to_first_token_seconds", "Seconds from arrival to the first token.", _TTFT_S)
        self._itl = histogram("inter_token_latency_seconds", "Seconds between a request's tokens.", _ITL_S)
        self._e2e = histogram("e2e_request_latency_seconds", "Seconds from arrival to a request's end.", _E2E_S)
        self._queue = histogram("request_queue_time_seconds", "Seconds from arrival to the first chunk.", _E2E_S)
        self._prefill = histogram(
            "request_prefill_time_seconds", "Seconds from the first chunk to the first token.", _E2E_S
        )
        self._decode = histogram("request_decode_time_seconds", "Seconds from the first token to the last.", _E2E_S)
        self.longest_stall = 0.0  # seconds for which the event loop answered nobody
        self.longest_own_stall = 0.0  # the same, less the time that its thread did not run
        self.registry.register(self)

    def answered(self, method: str, path: str, status: int) -> None:
        """Count an answer. `path` has the names of its parts in place of what a client wrote."""
        self._answers.labels(self._model_name, method if method in _METHODS else "other", path, str(status)).inc()

    def used(self, key: str, prompt_tokens: int, generation_tokens: int) -> None:
        """Count what a request of an API key took."""
        for name, value in (
            ("requests", 1),
            ("prompt_tokens", prompt_tokens),
            ("generation_tokens", generation_tokens),
        ):
            self._of_key[name].labels(self._model_name, key).inc(value)

    def accepted(self, prompt_tokens: int, requests: int) -> None:
        """Count a prompt that was sent to the engine for as many outputs."""
        self._prompt_tokens.inc(prompt_tokens * requests)

    def first_token(self, arrival: float, dispatched: float | None, at: float) -> None:
        """Count a request's first token: when the request came, when its first chunk was dispatched, when it came."""
        self._generation_tokens.inc()
        self._ttft.observe(at - arrival)
        if dispatched is not None:
            self._queue.observe(dispatched - arrival)
            self._prefill.observe(at - dispatched)

    def next_token(self, seconds: float) -> None:
        """Count a token that came `seconds` after the one before."""
        self._generation_tokens.inc()
        self._itl.observe(seconds)

    def ended(self, reason: str, seconds: float, decoding: float | None) -> None:
        """Count an end: seconds since the arrival, and between the first and the last token where there was one."""
        self._success.labels(self._model_name, reason).inc()
        self._e2e.observe(seconds)
        if decoding is not None:
            self._decode.observe(decoding)

    def collect(self) -> Iterator[Metric]:
        """Yield what the front and the newest snapshots say; prometheus_client calls this."""
        for family in self._families():
            named = ({"model_name": self._model_name} | each.labels for each in family.samples)
            family.samples = [each._replace(labels=labels) for each, labels in zip(family.samples, named, strict=True)]
            yield family

    def _families(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "gapless:front_longest_stall_seconds",
            "Longest time for which the front's event loop answered nobody.",
            value=self.longest_stall,
        )
        yield GaugeMetricFamily(
            "gapless:front_longest_own_stall_seconds",
            "Longest time for which the front's event loop answered nobody because it computed.",
            value=self.longest_own_stall,
        )
        ready = GaugeMetricFamily("gapless:replica_ready", "1 while the replica takes requests.", labels=["replica"])
        for replica, is_ready in self.ready.items():
            ready.add_metric([str(replica)], is_ready)
        yield ready
        families: dict[str, Metric] = {}
        for replica, found in self.snapshots.items():
            for family in self._of_engine(str(replica), found):
                families.setdefault(family.name, family)
                if families[family.name] is not family:
                    families[family.name].samples += family.samples
        yield from families.values()

    def _of_engine(self, replica: str, found: Snapshot) -> Iterator[Metric]:
        """Yield what the newest snapshot says of a replica."""

        def gauge(name: str, text: str, value: float) -> Metric:
            family = GaugeMetricFamily(f"gapless:{name}", text, labels=["model_name", "replica"])
            family.add_metric([self._model_name, replica], value)
            return family

        def counter(name: str, text: str, value: float) -> Metric:
            family = CounterMetricFamily(f"gapless:{name}", text, labels=["model_name", "replica"])
            family.add_metric([self._model_name, replica], value)
            return family

        yield gauge("num_requests_running", "Requests that hold KV blocks.", found.running)
        yield gauge("num_requests_waiting", "Requests that are not admitted yet.", found.waiting)
        yield gauge(
            "kv_cache_usage_perc", "Share of the KV blocks in use; 1 is all.", found.kv_blocks_used / self.num_blocks
        )
        yield counter("num_preemptions", "Preemptions of requests that have ended.", found.preemptions)
        yield counter("prefix_cache_queries", "Prompt tokens of admitted requests.", found.prefix_queries)
        yield counter("prefix_cache_hits", "Prompt tokens that were found in the prefix cache.", found.prefix_hits)
        reasons = GaugeMetricFamily(
            "gapless:num_requests_waiting_by_reason",
            "Requests that are not admitted yet, by what they wait for.",
            labels=["model_name", "replica", "reason"],
        )
        for reason, holds in (("kv_full", found.is_short_of_kv), ("slots", not found.is_short_of_kv)):
            reasons.add_metric([self._model_name, replica, reason], found.waiting if holds else 0)
        yield reasons
        micro_batches = HistogramMetricFamily(
            "gapless:iteration_tokens_total",
            "Tokens of a micro-batch, of prompts and of outputs.",
            labels=["model_name", "replica"],
        )
        bounds = [*(str(float(bound)) for bound in TOKEN_BOUNDS), "+Inf"]
        buckets = list(zip(bounds, accumulate(found.by_tokens), strict=True))
        micro_batches.add_metric([self._model_name, replica], buckets, found.tokens)
        yield micro_batches
        busy = CounterMetricFamily(
            "gapless:stage_busy_seconds", "Seconds that a stage computed.", labels=["replica", "stage"]
        )
        idle = CounterMetricFamily(
            "gapless:stage_idle_seconds",
            "Seconds that a stage was idle, by the ledger's cause.",
            labels=["replica", "stage", "cause"],
        )
        for stage, (seconds, lost) in enumerate(zip(found.busy, found.idle_at(time.monotonic()), strict=True)):
            busy.add_metric([replica, str(stage)], seconds)
            for cause, value in zip(CAUSES, lost, strict=True):
                shown = self._shown[replica, stage, cause] = max(value, self._shown.get((replica, stage, cause), 0.0))
                idle.add_metric([replica, str(stage), cause.value], shown)
        yield busy
        yield idle
        slow = GaugeMetricFamily(
            "gapless:stage_slowdown",
            "How many times longer than usual a stage takes while it is a straggler, else 1.",
            labels=["replica", "stage"],
        )
        slow_seconds = CounterMetricFamily(
            "gapless:stage_slow_seconds", "Seconds for which a stage was a straggler.", labels=["replica", "stage"]
        )
        slowdown = {each.stage: each.slowdown for each in found.slow}
        for stage, seconds in enumerate(found.slow_seconds):
            slow.add_metric([replica, str(stage)], slowdown.get(stage, 1.0))
            slow_seconds.add_metric([replica, str(stage)], seconds)
        yield slow
        yield slow_seconds
        yield gauge("pipeline_epoch", "Faults of the pipeline that began an epoch.", found.recovery.epoch)
        recoveries = CounterMetricFamily(
            "gapless:recoveries",
            "Times that the pipeline recovered from a fault, by what had failed.",
            labels=["model_name", "replica", "reason"],
        )
        for reason in get_args(FaultReason):
            recoveries.add_metric([self._model_name, replica, reason], found.recovery.repaired.get(reason, 0))
        yield recoveries
        repair = CounterMetricFamily(
            "gapless:recovery_seconds",
            "Seconds until the pipeline had recovered from a fault, by part.",
            labels=["model_name", "replica", "part"],
        )
        for part, value in ({"detect": 0.0} | found.recovery.seconds).items():
            repair.add_metric([self._model_name, replica, part], value)
        yield repair
