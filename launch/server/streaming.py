"""Answers in progress: as server-sent events, one per token, or whole at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.background import BackgroundTask
from starlette.responses import Response

from .answers import Answer
from .engine_client import Call, EngineError
from .errors import ApiError
from .replica_set import Engine

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send


_LONG_TEXT = 10_000  # characters; longer bodies are built in a thread, so that they do not block other answers


class ClientGone(Exception):  # noqa: N818
    """The client has closed the connection before its answer was complete."""


class _Watched:
    """Context manager that aborts a call's requests on client disconnect, on timeout, and on exit.

    On disconnect or timeout, waiting for the call's updates raises `ClientGone` or `ApiError`.
    """

    def __init__(
        self, client: Engine, call: Call, numbers: Sequence[int], timeout_s: float | None, receive: Receive
    ) -> None:
        self._client = client
        self._call = call
        self._numbers = numbers
        self._timeout_s = timeout_s
        self._receive = receive
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        self._gone = asyncio.create_task(until_gone(self._receive))
        self._gone.add_done_callback(lambda task: self._call.fail(ClientGone()))
        if self._timeout_s is not None:
            error = ApiError(504, f"the answer was not complete within serve.timeout_s={self._timeout_s:g}")
            self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._call.fail, error)

    def __exit__(self, *error: object) -> None:
        self._gone.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._client.abort(self._numbers)


async def whole(
    request: Request, answer: Answer, client: Engine, call: Call, numbers: Sequence[int], timeout_s: float | None
) -> Response:
    """Wait for all outputs and answer with them.

    Raises:
        ApiError: an output failed or timed out.
    """
    try:
        with _Watched(client, call, numbers, timeout_s, request.receive):
            while not call.finished:
                await call.next()
        is_long = sum(len(output.text) for output in call.outputs) > _LONG_TEXT
        body = await asyncio.to_thread(body_of, answer, call) if is_long else body_of(answer, call)
    except ClientGone:
        call.on_settled()
        return Response(status_code=499)
    except ApiError:
        call.on_settled()
        raise
    except EngineError as error:
        raise ApiError(503, str(error)) from error
    return Response(body, media_type="application/json", background=BackgroundTask(call.on_settled))


def body_of(answer: Answer, call: Call) -> bytes:
    """Return the body of the answer to a finished call.

    Raises:
        ApiError: an output failed.
    """
    _check(call, (output.finish_reason for output in call.outputs))
    return answer.whole(call.outputs, call.prompt_logprobs)


class EventStream(Response):
    """Server-sent events: the events of `answer`, one per token, and its end marker such as `[DONE]`."""

    media_type = "text/event-stream"

    def __init__(
        self, answer: Answer, client: Engine, call: Call, numbers: Sequence[int], timeout_s: float | None
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._answer = answer
        self._call = call
        self._watched = partial(_Watched, client, call, numbers, timeout_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events. If the client disconnects before the end, the request is aborted."""
        is_settled = True
        with suppress(ClientGone), self._watched(receive):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            is_settled = await self._send_events(send, scope["state"])
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        if is_settled:
            self._call.on_settled()

    async def _send_events(self, send: Send, state: MutableMapping[str, Any]) -> bool:
        """Send the answer; on failure, the partial answer and the error, which is also stored in `state`.

        Returns:
            Whether the request is settled; false if the engine failed.
        """
        failed: ApiError | None = None
        is_settled = True
        answer, left = self._answer, len(self._call.outputs)

        async def event(body: bytes) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": True})

        try:
            for body in answer.first_chunks():
                await event(body)
            while left:
                for delta in await self._call.next():
                    _check(self._call, [delta.finish_reason])
                    left -= delta.finish_reason is not None
                    if body := answer.chunk(delta):
                        await event(body)
            for body in answer.last_chunks():
                await event(body)
        except EngineError as error:
            is_settled, failed = False, ApiError(503, str(error))
        except ApiError as error:
            failed = error
        if failed is not None:
            failed.request_id = state["request_id"]
            state.update(error=failed.message, failed=failed.status)
            await event(answer.error(failed))
        if answer.end:
            await event(answer.end)
        return is_settled


def _check(call: Call, reasons: Iterable[str | None]) -> None:
    if "error" not in reasons:
        return
    if call.has_structured_outputs:
        text = "structured_outputs: too complex during generation; simplify them (or the logits are not finite)"
        raise ApiError(400, text, param="structured_outputs")
    raise ApiError(500, "the model's logits are not finite; check its weights")


async def until_gone(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
