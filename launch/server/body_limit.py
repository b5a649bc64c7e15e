"""Size limit and decompression of request bodies."""

from __future__ import annotations

import asyncio
import zlib
from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from .errors import ApiError
from .routes import error_response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_PLAIN = ("", "identity")
_WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # zlib's wbits: gzip or zlib format


class BodyLimit:
    """Answers 413 to a body of more than `max_bytes`, before reading all of it, and decompresses `gzip` and `deflate`.

    The limit applies both before and after decompression. Other encodings get 415. A thread decompresses.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the application, or refuse its body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        text = f"the body is larger than serve.max_body_mib={self._max_bytes / (1 << 20):g}"
        too_large = ApiError(413, text, headers={"connection": "close"})  # the rest of the body is not read
        headers = Headers(scope=scope)
        length, encoding = headers.get("content-length", "0"), headers.get("content-encoding", "").strip().lower()
        if length.isdigit() and int(length) > self._max_bytes:
            await error_response(too_large, scope)(scope, receive, send)
            return
        if encoding not in (*_PLAIN, *_WINDOWS):
            taken = {"accept-encoding": "gzip, deflate", "connection": "close"}
            text = f"Content-Encoding: {encoding}: must be gzip or deflate"
            await error_response(ApiError(415, text, headers=taken), scope)(scope, receive, send)
            return
        inflated = None if encoding in _PLAIN else _Inflated(encoding)
        came = 0

        async def limited() -> Message:
            nonlocal came
            message = await receive()
            came += len(message.get("body", b""))
            if came > self._max_bytes:
                raise too_large
            if inflated is not None and message["type"] == "http.request":
                is_last = not message.get("more_body", False)
                body = await asyncio.to_thread(inflated.next, message.get("body", b""), self._max_bytes, is_last)
                message = {**message, "body": body}
                if inflated.size > self._max_bytes:
                    raise too_large
            return message

        await self._app(scope, limited, send)


class _Inflated:
    """Streaming decompression of a body."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._inflater = zlib.decompressobj(_WINDOWS[encoding])
        self.size = 0  # bytes so far

    def next(self, data: bytes, most: int, is_last: bool) -> bytes:
        """Return the next piece. Decompression stops one byte after `most` bytes in total.

        Raises:
            ApiError: the body is not in that encoding, or is truncated.
        """
        found = b""
        try:
            while data and self.size <= most:
                if self._inflater.eof:  # gzip may have several members
                    self._inflater = zlib.decompressobj(_WINDOWS[self._encoding])
                piece = self._inflater.decompress(data, most + 1 - self.size)
                found, data = found + piece, self._inflater.unused_data
                self.size += len(piece)
        except zlib.error as error:
            raise self._wrong(str(error)) from error
        if is_last and self.size <= most and not self._inflater.eof and self.size + len(data):
            raise self._wrong("it is truncated")
        return found

    def _wrong(self, why: str) -> ApiError:
        return ApiError(400, f"the body is not valid {self._encoding}, which Content-Encoding specifies: {why}")
