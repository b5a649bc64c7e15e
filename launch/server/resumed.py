"""The answers to requests that a server took up again after a restart."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from .answers import Asked
from .engine_client import Call, EngineError
from .errors import ApiError
from .streaming import body_of, until_gone


class Resumed:
    """A request that goes on without its client, who may ask for the answer. It comes to a body or an error."""

    def __init__(self) -> None:
        self._ended = asyncio.Event()
        self._body = b""
        self._error: ApiError | None = None
        self._following: asyncio.Task[None] | None = None

    def fail(self, error: ApiError) -> None:
        """Say that it cannot go on."""
        self._error = error
        self._ended.set()

    def follow(self, asked: Asked, call: Call) -> None:
        """Make the answer once the outputs of `call` have ended."""
        self._following = asyncio.create_task(self._follow(asked, call))

    async def body(self, request: Request) -> bytes:
        """Wait for the answer, while the client that asks for it does. Any number of clients may ask, again too.

        Raises:
            ApiError: the request could not go on.
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
