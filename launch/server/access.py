"""Access log, metrics and trace of each answered request."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from ..stderr_log import FIELDS, one_word
from .exchange import REFUSED, Exchange

if TYPE_CHECKING:
    from .keys import Keys
    from .prometheus import Metrics
    from .rate_limit import RateLimits
    from .tracing import Traces

_log = logging.getLogger(__name__)


class Access:
    """Logs, counts and traces each finished exchange."""

    def __init__(self, keys: Keys, metrics: Metrics, limits: RateLimits, traces: Traces | None) -> None:
        self._keys = keys
        self._metrics = metrics
        self._limits = limits
        self._traces = traces

    def note(self, exchange: Exchange) -> None:
        """Record a finished exchange."""
        exchange.ended = time.monotonic()
        key = self._keys.shown(exchange.holder)
        self._metrics.answered(exchange.method, exchange.label, exchange.status)
        if exchange.call is not None:
            self._limits.spend(exchange.holder, exchange.output_tokens)
            self._metrics.used(key, exchange.prompt_tokens, exchange.output_tokens)
        if self._traces is not None:
            self._traces.note(exchange)
        _write(exchange, key)

    def close(self) -> None:
        """Flush pending traces."""
        if self._traces is not None:
            self._traces.close()


def _write(exchange: Exchange, key: str) -> None:
    """Write the log line of an exchange."""
    level = logging.INFO
    if exchange.route is not None and exchange.route.is_quiet:
        level = logging.DEBUG
    elif exchange.status >= 500 and exchange.status != 501:  # 501: unknown method
        level = logging.ERROR
    elif exchange.status in REFUSED:
        level = logging.WARNING
    if not _log.isEnabledFor(level):
        return
    fields: dict[str, Any] = {"request_id": exchange.id, "client": exchange.client, "key": key}
    if exchange.call is not None:
        fields |= {"prompt_tokens": exchange.prompt_tokens, "output_tokens": exchange.output_tokens}
    if exchange.ttft is not None:
        fields["ttft_ms"] = round(exchange.ttft * 1e3, 1)
    fields["duration_ms"] = round(exchange.seconds * 1e3, 1)
    fields |= {"field": exchange.state.get("field") or "", "error": exchange.error}
    text = f"{exchange.method} {one_word(exchange.path)} {exchange.status}"
    _log.log(level, "%s", text, extra={FIELDS: {name: value for name, value in fields.items() if value != ""}})
