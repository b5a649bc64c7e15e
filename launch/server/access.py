"""What is kept of each request once it is answered: a line in the log, counters, and a trace."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..stderr_log import FIELDS, one_word

if TYPE_CHECKING:
    from .asked import Asked
    from .engine_client import Call
    from .keys import Keys
    from .prometheus import Metrics
    from .rate_limit import RateLimits
    from .tracing import Traces

_log = logging.getLogger(__name__)
_QUIET = ("/", "/health", "/health/live", "/health/ready", "/load", "/metrics", "/page/{name}", "/version")
_REFUSED = (401, 403, 429)
CLIENT_LEFT = 499  # nginx's status for an answer that its client did not wait for


@dataclass(slots=True)
class Exchange:
    """A request and its answer. `state` is what the application noted: the holder of the key, what was asked for.

    `route` is the path with the names of its parts, which are few, as `/v1/models/{name}`. `began` is on the monotonic
    clock, in seconds.
    """

    method: str
    path: str
    id: str
    client: str = ""
    route: str = ""
    status: int = CLIENT_LEFT
    state: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0

    @property
    def seconds(self) -> float:
        """How long the answer took."""
        return self.ended - self.began

    @property
    def error(self) -> str:
        """What a refusal said, where it quotes nothing of the request."""
        return self.state.get("error", "") if self.status >= 500 or self.status in _REFUSED else ""

    @property
    def holder(self) -> str:
        """The holder of its key, "" where none is asked for or none was valid."""
        return self.state.get("holder") or ""

    @property
    def asked(self) -> Asked | None:
        """What a request for outputs asks for; None for others, and where it was refused."""
        return self.state.get("asked")

    @property
    def call(self) -> Call | None:
        """The outputs of such a request."""
        return self.state.get("call")

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompts."""
        return sum(map(len, self.asked.prompts)) if self.asked is not None and self.call is not None else 0

    @property
    def output_tokens(self) -> int:
        """Tokens that it got."""
        return sum(len(output.token_ids) for output in self.call.outputs) if self.call is not None else 0

    @property
    def ttft(self) -> float | None:
        """Seconds until its first token."""
        return None if self.call is None or self.call.first is None else self.call.first - self.call.arrival


class Access:
    """Takes note of each exchange that is over."""

    def __init__(self, keys: Keys, metrics: Metrics, limits: RateLimits, traces: Traces | None) -> None:
        self._keys = keys
        self._metrics = metrics
        self._limits = limits
        self._traces = traces

    def note(self, exchange: Exchange) -> None:
        """Note an exchange."""
        exchange.ended = time.monotonic()
        key = self._keys.shown(exchange.holder)
        self._metrics.answered(exchange.method, exchange.route or "other", exchange.status)
        if exchange.call is not None:
            self._limits.spend(exchange.holder, exchange.output_tokens)
            self._metrics.used(key, exchange.prompt_tokens, exchange.output_tokens)
        if self._traces is not None:
            self._traces.note(exchange)
        _write(exchange, key)

    def close(self) -> None:
        """Send the traces that wait."""
        if self._traces is not None:
            self._traces.close()


def _write(exchange: Exchange, key: str) -> None:
    """Write the line of an exchange."""
    level = logging.INFO
    if exchange.route in _QUIET:
        level = logging.DEBUG
    elif exchange.status >= 500 and exchange.status != 501:  # of a method that is none
        level = logging.ERROR
    elif exchange.status in _REFUSED:
        level = logging.WARNING
    if not _log.isEnabledFor(level):
        return
    fields: dict[str, Any] = {
        "request_id": exchange.id,
        "client": exchange.client,
        "key": key,
    }
    if exchange.call is not None:
        fields |= {"prompt_tokens": exchange.prompt_tokens, "output_tokens": exchange.output_tokens}
    if exchange.ttft is not None:
        fields["ttft_ms"] = round(exchange.ttft * 1e3, 1)
    fields["duration_ms"] = round(exchange.seconds * 1e3, 1)
    if exchange.error:
        fields["error"] = exchange.error
    text = f"{exchange.method} {one_word(exchange.path)} {exchange.status}"
    _log.log(level, "%s", text, extra={FIELDS: {name: value for name, value in fields.items() if value != ""}})
