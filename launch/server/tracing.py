"""OpenTelemetry traces: one span per generation request, with the GenAI semantic conventions."""

from __future__ import annotations

import re
import time
from importlib import metadata
from typing import TYPE_CHECKING, Any

from ...conf.errors import ConfigError

if TYPE_CHECKING:
    from .exchange import Exchange

_KEY = "serve.otlp_endpoint"


class Traces:
    """Exports spans to `endpoint` from a thread, in batches. A request's `traceparent` is the parent of its span.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        try:
            import requests
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            text = f"{_KEY}={endpoint}: OpenTelemetry is not installed; pip install '.[otel]' in a checkout installs it"
            raise ConfigError(text) from error
        version = metadata.version("gapless")
        about = Resource.create({"service.name": "gapless", "service.version": version})
        self._provider = TracerProvider(resource=about, shutdown_on_exit=False)
        session = None
        if re.match(r"https?://(localhost|127\.[\d.]+|\[::1\])[:/]", endpoint):  # bypass proxies
            session = requests.Session()
            session.trust_env = False
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint, session=session)))
        self._tracer = self._provider.get_tracer("gapless", version)
        self._model = model

    def note(self, exchange: Exchange) -> None:
        """Create the span of a finished exchange, if it is a generation request."""
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        if exchange.asked is None or exchange.route is None:
            return
        operation = exchange.route.operation
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            TraceContextTextMapPropagator().extract(exchange.headers),
            kind=SpanKind.SERVER,
            start_time=_wall(exchange.began),
        )
        span.set_attributes(_attributes(exchange, operation, self._model))
        if exchange.call is not None and exchange.call.first is not None:
            span.add_event("first token", timestamp=_wall(exchange.call.first))
        if exchange.status >= 400:
            span.set_attribute("error.type", str(exchange.status))
            span.set_status(Status(StatusCode.ERROR, exchange.error))
        span.end(_wall(exchange.ended))

    def close(self) -> None:
        """Flush pending spans and stop the thread."""
        self._provider.shutdown()


def _wall(monotonic: float) -> int:
    """Convert monotonic seconds to wall-clock nanoseconds."""
    return time.time_ns() - int((time.monotonic() - monotonic) * 1e9)


def _attributes(exchange: Exchange, operation: str, model: str) -> dict[str, Any]:
    asked, call = exchange.asked, exchange.call
    assert asked is not None
    params = asked.params
    found: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "gapless",
        "gen_ai.request.model": model,
        "gen_ai.request.choice.count": asked.body.n,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.stream": asked.body.stream,
        "gen_ai.output.type": "text",
        "gen_ai.response.id": asked.answer.id,
        "gen_ai.response.model": model,
        "http.request.method": exchange.method,
        "http.route": exchange.label,
        "http.response.status_code": exchange.status,
        "gapless.request_id": exchange.id,
    }
    if call is not None:
        found |= {
            "gen_ai.usage.input_tokens": exchange.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": sum(output.cached_tokens for output in call.outputs),
            "gen_ai.usage.output_tokens": exchange.output_tokens,
            "gen_ai.response.finish_reasons": [output.finish_reason or "abort" for output in call.outputs],
        }
    if exchange.ttft is not None:
        found["gen_ai.response.time_to_first_chunk"] = exchange.ttft
    return found
