"""What every answer has, whatever its path: a request id, no body to HEAD, the origin that may read it, a note."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from starlette.middleware.cors import CORSMiddleware

from .exchange import CLIENT_LEFT, Exchange

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

REQUEST_ID = b"x-request-id"
_ALSO = {"/v1/messages": (b"request-id",)}  # Anthropic's name
_IGNORED = {"ignored": b"x-ignored-fields", "ignored_tools": b"x-ignored-tools"}
_PLAIN = re.compile(rb"[!-~](?:[ -~]{0,1022}[!-~])?")  # what a header may hold, in ASCII


def request_id(headers: Sequence[tuple[bytes, bytes]]) -> str:
    """Return the id that a request bears in its headers, whose names are in lower case; else a new one."""
    given = next((value for name, value in headers if name == REQUEST_ID), b"")
    return given.decode() if _PLAIN.fullmatch(given) else secrets.token_hex(12)


class EveryAnswer:
    """Wraps the whole application.

    A request's id is `scope["state"]["request_id"]`. The header `x-ignored-fields` names the fields of its body that
    the server does not know, which `scope["state"]["ignored"]` holds; `x-ignored-tools`, with `ignored_tools`, the
    types of tools that it does not have and has left out. HEAD is answered as GET, without the body.

    Args:
        app: the application.
        origins: pages of which sites may call the server from a browser; "*": of all.
        note: is told of each exchange that is over.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str], note: Callable[[Exchange], None]) -> None:
        self._app = app
        self._note = note
        if origins:
            self._app = CORSMiddleware(
                app,
                allow_origins=origins,
                allow_methods=("GET", "HEAD", "POST"),
                allow_headers=("*",),
                allow_private_network=True,
                expose_headers=(REQUEST_ID.decode(), *map(bytes.decode, _IGNORED.values()), "retry-after"),
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        id, is_head, is_done = request_id(scope["headers"]), scope["method"] == "HEAD", False
        state = {**scope.get("state", {}), "request_id": id}
        own = {**scope, "state": state, "method": "GET" if is_head else scope["method"]}
        client = scope["client"][0] if scope.get("client") else ""
        exchange = Exchange(scope["method"], scope["path"], id, client, state=state, raw_headers=scope["headers"])
        status, is_whole = CLIENT_LEFT, False

        async def answer(message: Any) -> None:
            nonlocal is_done, status, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not message.get("more_body", False):
                is_whole = True
            if is_done:
                return
            if message["type"] == "http.response.start":
                further = [(name, id.encode()) for name in (REQUEST_ID, *_ALSO.get(scope["path"], ()))]
                for key, header in _IGNORED.items():
                    if names := state.get(key):
                        further.append((header, ", ".join(names).encode()))
                message = {**message, "headers": [*message["headers"], *further]}
            elif is_head:
                is_done, message = True, {"type": "http.response.body"}
            await send(message)

        try:
            await self._app(own, receive, answer)
        finally:
            if is_whole or status >= 400:
                exchange.status = state.get("failed", status)
            exchange.route = getattr(own.get("route"), "path", "")
            self._note(exchange)
