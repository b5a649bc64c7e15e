"""The HTTP server: `serve.KEY=VALUE`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from .errors import check
from .ranges import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, Within, check_ranges

ToolFormatName = Literal[
    "harmony",
    "kimi_k2",
    "deepseek_v3",
    "deepseek_v31",
    "glm45",
    "qwen3_coder",
    "mistral_v11",
    "mistral",
    "hermes",
    "llama3",
    "json",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConfig:
    """Address, access control and limits of the HTTP server."""

    host: str = "127.0.0.1"
    """bind address; 0.0.0.0: all IPv4 interfaces, `::`: IPv6 too"""
    port: Annotated[int, Within(0, 65_535)] = 8000
    """port; 0: any free port"""
    model_name: tuple[str, ...] | None = None
    """served model names; responses use the first; '*': any name is accepted; null: the name of model"""
    config: str | None = None
    """YAML file of keys (nested, dotted, or vLLM's names), which the command line overrides; null: none"""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """API keys, one of which a request to /v1 must have (`Authorization: Bearer KEY`), and files as @FILE with one key
    per line, optionally followed by a name for the log; empty: no authentication"""
    ssl_certfile: str | None = None
    """TLS certificate file; null: plain HTTP"""
    ssl_keyfile: str | None = None
    """private key file; null: in ssl_certfile"""
    ssl_ca_certs: str | None = None
    """CA certificates that client certificates are verified against; null: no client certificates"""
    requests_per_minute: Annotated[int | None, AT_LEAST_ONE] = None
    """rate limit in requests per minute per API key, or in total without keys; above it status 429; null: none"""
    tokens_per_minute: Annotated[int | None, AT_LEAST_ONE] = None
    """rate limit in prompt and output tokens per minute per API key, or in total without keys; null: none"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """minimum level of log messages; info: one line per request; debug: also for /health and /metrics"""
    log_format: Literal["text", "json"] = "text"
    """log line format"""
    otlp_endpoint: str | None = None
    """OpenTelemetry traces endpoint, one span per request, as http://127.0.0.1:4318/v1/traces; null: none"""
    allowed_origins: tuple[str, ...] = ()
    """CORS: origins that may call the server from a browser, as https://chat.example; '*': all; empty: same origin"""
    isolate_keys: bool = False
    """never share KV blocks between API keys, so that latencies do not reveal prefixes of other keys; no effect without
    keys"""
    share_by: Literal["key", "user"] = "key"
    """unit of scheduler.order=fair_share: API key, or the request's `user`; without keys always `user`"""
    replicas: Annotated[int, Within(1, 1024)] = 1
    """data-parallel pipelines, each with its own ranks; requests are routed to the one with the fewest tokens to
    compute"""
    max_waiting: Annotated[int, AT_LEAST_ONE] = 1024
    """maximum requests waiting for their first token; above it status 429"""
    max_body_mib: Annotated[float, Within(0, 1024, open=True)] = 32.0
    """maximum request body in MiB; above it status 413"""
    max_connections: Annotated[int, AT_LEAST_ONE] = 2048
    """maximum open connections; above it status 503 and the connection is closed"""
    read_timeout_s: Annotated[float, POSITIVE] = 30.0
    """seconds within which a complete request with its body must arrive; else status 408"""
    keep_alive_s: Annotated[float, POSITIVE] = 120.0
    """seconds that an idle connection stays open; longer than proxies and clients keep theirs, so that none sends a
    request while the server closes the connection"""
    write_timeout_s: Annotated[float, POSITIVE] = 60.0
    """seconds after which a client that reads nothing of its response is disconnected and its requests are aborted"""
    timeout_s: Annotated[float | None, POSITIVE] = None
    """request timeout in seconds; null: none"""
    drain_s: Annotated[float, NOT_NEGATIVE] = 60.0
    """seconds that running requests may take to finish after SIGTERM"""
    tool_format: ToolFormatName | None = None
    """tool call format of the model; null: detected from its chat template"""
    chat_template: str | None = None
    """name of one of the checkpoint's chat templates, or a file with another; null: the default one, or
    tool_use for a chat with tools"""
    strict: bool = False
    """whether a request with a field that nobody knows here gets status 400, instead of a warning"""
    journal: str | None = None
    """file that journals accepted requests and their tokens, so that a restarted server continues unfinished requests;
    null: none"""

    def model_names(self, own: str) -> tuple[str, ...]:
        """Return the served model names, the one in responses first; `own` if none is set."""
        names = [name for name in self.model_name or (own,) if name != "*"]
        return tuple(dict.fromkeys(names or [own]))

    @property
    def takes_any_name(self) -> bool:
        """Whether requests may name any model."""
        return "*" in (self.model_name or ())

    def __post_init__(self) -> None:
        check_ranges(self, "serve.")
        check("serve.host", self.host, bool(self.host), "an address of this machine")
        has_names = self.model_name is None or (bool(self.model_name) and all(self.model_name))
        check("serve.model_name", self.model_name, has_names, "null, a name, or a list of names")
        check("serve.api_keys", "[...]", all(self.api_keys), "non-empty keys")
        is_tls = self.ssl_certfile is not None or (self.ssl_keyfile is None and self.ssl_ca_certs is None)
        check("serve.ssl_certfile", self.ssl_certfile, is_tls, "a file if ssl_keyfile or ssl_ca_certs is set")
        is_url = self.otlp_endpoint is None or re.fullmatch(r"https?://\S+", self.otlp_endpoint) is not None
        check("serve.otlp_endpoint", self.otlp_endpoint, is_url, "null or http://HOST:PORT/v1/traces")
        is_origin = all(each == "*" or re.fullmatch(r"[\w.+-]+://[^/]+", each) for each in self.allowed_origins)
        check("serve.allowed_origins", list(self.allowed_origins), is_origin, "SCHEME://HOST[:PORT] or '*'")
        check("serve.chat_template", self.chat_template, self.chat_template != "", "null, a name or a file")
        check("serve.journal", self.journal, self.journal != "", "null or a file")
