"""The HTTP server: `serve.KEY=VALUE`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from .errors import check, check_each

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
    """Where the server listens, whom it lets in, and how much it takes on."""

    host: str = "127.0.0.1"
    """address that the server binds to; 0.0.0.0 lets other machines in, :: those with IPv6 too"""
    port: int = 8000
    """port; 0: any that is free"""
    model_name: tuple[str, ...] | None = None
    """the model's names in requests; answers use the first; '*': any name is accepted; null: as model says"""
    config: str | None = None
    """YAML file of keys (nested, dotted, or vLLM's names), over which those of the command line hold; null: none"""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """keys of which a request to /v1 must bear one (`Authorization: Bearer KEY`), and files that hold one a line, as
    @FILE, with a name for the log behind it; empty: none is asked for"""
    ssl_certfile: str | None = None
    """file with the certificate, which makes the server speak TLS; null: HTTP"""
    ssl_keyfile: str | None = None
    """file with the certificate's key; null: it is in ssl_certfile"""
    ssl_ca_certs: str | None = None
    """file with certificates, of which one must have signed that of a client; null: clients need none"""
    requests_per_minute: int | None = None
    """most requests of an API key in a minute, or of all without keys; one more gets status 429; null: no limit"""
    tokens_per_minute: int | None = None
    """most tokens of prompts and outputs of an API key in a minute, or of all without keys; null: no limit"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """messages below it are left out; info: a line for each request; debug: for those to /health and /metrics too"""
    log_format: Literal["text", "json"] = "text"
    """form of a line of the log"""
    otlp_endpoint: str | None = None
    """URL that takes OpenTelemetry's traces, a span a request, as http://127.0.0.1:4318/v1/traces; null: none"""
    allowed_origins: tuple[str, ...] = ()
    """sites whose pages may call the server from a browser, as https://chat.example; '*': all; empty: none but the
    server's own"""
    isolate_keys: bool = False
    """whether requests of one API key never share KV blocks with those of another, so that no time shows a prefix that
    another one has sent; without keys it does nothing"""
    share_by: Literal["key", "user"] = "key"
    """whose requests scheduler.order=fair_share counts together: those of an API key, or of a request's `user`; without
    keys it is always the user's"""
    replicas: int = 1
    """pipelines that serve side by side, each with its own ranks; a request goes to that with the fewest tokens to
    compute"""
    max_waiting: int = 1024
    """most requests that wait for their first token; one more gets status 429"""
    max_body_mib: float = 32.0
    """largest body of a request in MiB; a larger one gets status 413"""
    max_connections: int = 2048
    """most open connections; one more gets status 503 and is closed"""
    read_timeout_s: float = 30.0
    """seconds within which a request must have arrived whole, with its body; a slower one gets status 408"""
    keep_alive_s: float = 120.0
    """seconds for which a connection without a request stays open; more than a proxy or a client keeps it, so that none
    sends a request into a connection that the server closes"""
    write_timeout_s: float = 60.0
    """seconds after which a client that takes nothing of its answer loses the connection, and its requests end"""
    timeout_s: float | None = None
    """seconds after which an unfinished request is ended; null: none"""
    drain_s: float = 60.0
    """seconds that running requests get to finish after SIGTERM"""
    tool_format: ToolFormatName | None = None
    """how the model writes calls of tools; null: as its chat template says"""
    chat_template: str | None = None
    """name of one of the checkpoint's chat templates, or a file with another; null: the default one, or
    tool_use for a chat with tools"""
    strict: bool = False
    """whether a request with a field that nobody knows here gets status 400, instead of a warning"""
    journal: str | None = None
    """file that keeps accepted requests and their tokens, so that a server that is started again with it goes on with
    what was unfinished; null: none"""

    def model_names(self, own: str) -> tuple[str, ...]:
        """Return the model's names, the one in answers first; `own` if no other name is set."""
        names = [name for name in self.model_name or (own,) if name != "*"]
        return tuple(dict.fromkeys(names or [own]))

    @property
    def takes_any_name(self) -> bool:
        """Whether requests may name any model."""
        return "*" in (self.model_name or ())

    def __post_init__(self) -> None:
        check("serve.host", self.host, bool(self.host), "an address of this machine")
        check("serve.port", self.port, 0 <= self.port < 1 << 16, "0 to 65535")
        has_names = self.model_name is None or (bool(self.model_name) and all(self.model_name))
        check("serve.model_name", self.model_name, has_names, "null, a name, or a list of names")
        check("serve.api_keys", "[...]", all(self.api_keys), "keys that are not empty")
        is_tls = self.ssl_certfile is not None or (self.ssl_keyfile is None and self.ssl_ca_certs is None)
        check("serve.ssl_certfile", self.ssl_certfile, is_tls, "a file where ssl_keyfile or ssl_ca_certs is one")
        is_url = self.otlp_endpoint is None or re.fullmatch(r"https?://\S+", self.otlp_endpoint) is not None
        check("serve.otlp_endpoint", self.otlp_endpoint, is_url, "null or http://HOST:PORT/v1/traces")
        is_origin = all(each == "*" or re.fullmatch(r"[\w.+-]+://[^/]+", each) for each in self.allowed_origins)
        check("serve.allowed_origins", list(self.allowed_origins), is_origin, "SCHEME://HOST[:PORT] or '*'")
        check("serve.replicas", self.replicas, 1 <= self.replicas <= 1024, "1 to 1024")
        counts = ("max_waiting", "max_connections", "requests_per_minute", "tokens_per_minute")
        check_each("serve.", self, lambda n: n >= 1, "1 or more", *counts)
        check("serve.max_body_mib", self.max_body_mib, 0 < self.max_body_mib <= 1024, "above 0, 1024 at most")
        seconds = ("read_timeout_s", "keep_alive_s", "write_timeout_s", "timeout_s")
        check_each("serve.", self, lambda each: 0 < each < math.inf, "above 0", *seconds)
        check("serve.chat_template", self.chat_template, self.chat_template != "", "null, a name or a file")
        check("serve.journal", self.journal, self.journal != "", "null or a file")
        check("serve.drain_s", self.drain_s, 0 <= self.drain_s < math.inf, "0 or more")
