"""How an answer is framed for clients of which uvicorn assumes too much."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def framed(cycle: RequestResponseCycle) -> Callable[[Any], Awaitable[None]]:
    """Return a `send` in place of the cycle's own.

    HTTP/1.0 knows no chunks, so that the end of the connection ends an answer without a length. A client that is
    answered while it waits for `100 Continue` may send its body or not (RFC 9110, 10.1.1): its connection is closed,
    since what comes next could be either.
    """
    send = cycle.send
    is_old = cycle.scope["http_version"] == "1.0"
    if is_old:  # it knows no `100 Continue` either
        cycle.waiting_for_100_continue = False

    async def framing(message: Any) -> None:
        if message["type"] == "http.response.start":
            if cycle.waiting_for_100_continue:
                cycle.keep_alive = False
            if is_old and all(name.lower() != b"content-length" for name, _ in message["headers"]):
                cycle.chunked_encoding = False
        elif is_old and cycle.chunked_encoding is False and cycle.expected_content_length == 0:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return framing
