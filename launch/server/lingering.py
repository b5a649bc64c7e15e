"""Transport with a lingering close, so that a client that is still sending gets its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

_LINGER_S = 1.0


class LingeringTransport:
    """A transport that closes in two steps if a client may still be sending.

    Closing a socket with unread or later incoming bytes resets the connection, and the client loses any answer that it
    has not read yet. So the sending side is shut down first. The protocol drops further input until the client closes
    its side or a second has passed.

    Args:
        transport: asyncio transport, to which other attributes are delegated.
        must_linger: called by `close`; whether to close in two steps.
    """

    def __init__(self, transport: asyncio.Transport, must_linger: Callable[[], bool]) -> None:
        self._transport = transport
        self._must_linger = must_linger
        self._is_lingering = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Return whether the transport is closing or lingering."""
        return self._is_lingering or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        """Send data; data written after `close` is dropped."""
        if not self._is_lingering:
            self._transport.write(data)

    def close(self) -> None:
        """Close now; if the client may still be sending, flush and keep reading for `_LINGER_S` seconds."""
        if self.is_closing():
            return
        if not self._must_linger() or not self._transport.can_write_eof():  # TLS cannot half-close
            self._transport.close()
            return
        self._is_lingering = True
        self._transport.resume_reading()
        self._transport.write_eof()  # once all is sent
        asyncio.get_running_loop().call_later(_LINGER_S, self._transport.close)
