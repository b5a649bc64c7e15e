"""Middleware for all paths: request ids, HEAD, CORS, headers for ignored fields, and access notes."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from starlette.middleware.cors import CORSMiddleware

from .exchange import CLIENT_LEFT, Exchange
from .routes import is_anthropic

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

REQUEST_ID = b"x-request-id"
_ANTHROPIC_ID = b"request-id"
_IGNORED = {"ignored": b"x-ignored-fields", "ignored_tools": b"x-ignored-tools"}
_PLAIN = re.compile(rb"[!-~](?:[ -~]{0,1022}[!-~])?")  # valid ASCII header values


def request_id(headers: Sequence[tuple[bytes, bytes]]) -> str:
    """Return the request id from headers with lower-case names; else a new one."""
    given = next((value for name, value in headers if name == REQUEST_ID), b"")
    return given.decode() if _PLAIN.fullmatch(given) else secrets.token_hex(12)


class EveryAnswer:
    """Wraps the whole application.

    A request's id is `scope["state"]["request_id"]`. The header `x-ignored-fields` lists the unknown fields of its
    body, from `scope["state"]["ignored"]`; `x-ignored-tools` lists the types of unsupported tools that were left out,
    from `ignored_tools`. HEAD is answered like GET, without the body.

    Args:
        app: the application.
        origins: sites allowed to call the server from a browser (CORS); "*": all.
        note: is called with each finished exchange.
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
        """Handle a request."""
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
                further = [(REQUEST_ID, id.encode())]
                if is_anthropic(scope["path"]):
                    further.append((_ANTHROPIC_ID, id.encode()))
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
            exchange.route = own.get("route")
            self._note(exchange)
