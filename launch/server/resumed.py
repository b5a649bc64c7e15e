"""The answers to requests that a server resumed after a restart."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from .answers import Asked
from .engine_client import Call, EngineError
from .errors import ApiError
from .streaming import body_of, until_gone


class Resumed:
    """A request that continues without its client, which may fetch the answer. It ends with a body or an error."""

    def __init__(self) -> None:
        self._ended = asyncio.Event()
        self._body = b""
        self._error: ApiError | None = None
        self._following: asyncio.Task[None] | None = None

    def fail(self, error: ApiError) -> None:
        """Fail the request."""
        self._error = error
        self._ended.set()

    def follow(self, asked: Asked, call: Call) -> None:
        """Build the answer once the outputs of `call` have finished."""
        self._following = asyncio.create_task(self._follow(asked, call))

    async def body(self, request: Request) -> bytes:
        """Wait for the answer until the client disconnects. Several clients may fetch it, repeatedly.

        Raises:
            ApiError: the request could not be continued.
        """
        ended, gone = asyncio.create_task(self._ended.wait()), asyncio.create_task(until_gone(request.receive))
        try:
            await asyncio.wait({ended, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            gone.cancel()
        if self._error is not None:
            raise self._error
        return self._body

    async def _follow(self, asked: Asked, call: Call) -> None:
        try:
            while not call.finished:
                await call.next()
            self._body = body_of(asked.answer, call)
            self._ended.set()
        except ApiError as error:
            self.fail(error)
        except EngineError as error:
            self.fail(ApiError(503, str(error)))
