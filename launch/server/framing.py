"""Answer framing for HTTP/1.0 clients and for `Expect: 100-continue`, beyond uvicorn's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def framed(cycle: RequestResponseCycle) -> Callable[[Any], Awaitable[None]]:
    """Return a replacement for the cycle's `send`.

    HTTP/1.0 has no chunked encoding, so an answer without a length ends by closing the connection. A client that is
    answered while it waits for `100 Continue` may or may not send its body (RFC 9110, 10.1.1). Its connection is
    closed, because the next bytes would be ambiguous.
    """
    send = cycle.send
    is_old = cycle.scope["http_version"] == "1.0"
    if is_old:  # HTTP/1.0 has no `100 Continue` either
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
