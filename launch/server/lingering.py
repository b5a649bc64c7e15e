"""The transport of a connection that a client gets its answer from, even if it is still sending."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

_LINGER_S = 1.0


class LingeringTransport:
    """A transport that closes in two steps where a client may still be sending.

    To close a socket that holds unread bytes, or that gets more of them, resets the connection, and the client loses
    the answer that it has not read by then. So the sending side ends first. What still comes is for the protocol to
    drop, until the client closes its side or a second is over.

    Args:
        transport: of asyncio; what is not defined here is passed on to it.
        must_linger: whether `close` takes two steps, asked when it is called.
    """

    def __init__(self, transport: asyncio.Transport, must_linger: Callable[[], bool]) -> None:
        self._transport = transport
        self._must_linger = must_linger
        self._is_lingering = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Return whether no byte that comes or is written counts any more."""
        return self._is_lingering or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        """Send data; what comes after `close` is dropped."""
        if not self._is_lingering:
            self._transport.write(data)

    def close(self) -> None:
        """Close at once; if the client may still be sending, send what is left and read on for `_LINGER_S` seconds."""
        if self.is_closing():
            return
        if not self._must_linger() or not self._transport.can_write_eof():  # TLS ends both sides at once
            self._transport.close()
            return
        self._is_lingering = True
        self._transport.resume_reading()
        self._transport.write_eof()  # once all is sent
        asyncio.get_running_loop().call_later(_LINGER_S, self._transport.close)
