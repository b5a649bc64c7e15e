"""A bound on the size of a request's body."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import ApiError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimit:
    """Answers 413 to a body of more than `max_bytes`, before it is all read."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the application, or answer 413 where its body is too large."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        text = f"the body is larger than serve.max_body_mib={self._max_bytes / (1 << 20):g}"
        error = ApiError(413, text, headers={"connection": "close"})  # what is left of the body is not read
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if length.isdigit() and int(length) > self._max_bytes:
            await error.response()(scope, receive, send)
            return
        taken = 0

        async def limited() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._max_bytes:
                raise error
            return message

        await self._app(scope, limited, send)
