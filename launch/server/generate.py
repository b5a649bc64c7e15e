"""Sends generation requests to the engine, and serves the answers of resumed ones."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from functools import partial

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response

from ...conf.errors import ConfigError
from ...models.grammar import Grammars
from ...runtime.serving.journal import Accepted
from .answers import Asked
from .engine_client import TAKES_REQUESTS, Call
from .errors import ApiError
from .requests import SamplingBody, each_output
from .route import Route
from .service import Service
from .streaming import EventStream, whole

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_RETRY_AFTER = {"retry-after": "1"}  # seconds


async def generate(service: Service, request: Request) -> Response:
    """Send a request to the engine and return the answer.

    Raises:
        ApiError: it is invalid, or cannot be accepted now.
    """
    route: Route = request.scope["route"]
    body: SamplingBody = request.state.body
    holder: str = request.state.holder
    assert route.ask is not None
    asked = request.state.asked = await route.ask(service, body)
    answer, id, journaling, client = asked.answer, request.state.request_id, service.journaling, service.client
    is_named = request.headers.get("x-request-id") == id
    if _ID.fullmatch(id):
        answer.id = answer.prefix + id
    elif journaling is not None:
        raise ApiError(400, "X-Request-Id: must be 1 to 128 letters, digits, dots, colons, - or _ with serve.journal")
    if client.state not in TAKES_REQUESTS:
        raise ApiError(503, client.reason, headers=_RETRY_AFTER)
    asked = await check(service, asked)
    _check_load(service, asked)
    service.limits.admit(holder, sum(map(len, asked.prompts)))
    call = request.state.call = Call(has_structured_outputs=asked.params.structured_outputs is not None)
    set_standing(call, service, holder, body)
    call.deadline = None if body.deadline_ms is None else call.arrival + body.deadline_ms / 1e3
    owner, given = service.keys.mark(holder), await request.body()
    if journaling is not None:
        journaling.check_new(route.path, owner, answer.id)
    numbers: list[int] = []
    for prompt in asked.prompts:
        numbers += client.submit(call, prompt, each_output(asked.params, body.n))
    if journaling is not None and (body.stream or is_named):  # else its client does not know the id
        accepted = Accepted(answer.id, owner, route.path, given, answer.created, numbers)
        journaling.accept(accepted, asked, call)
    if body.stream:
        return EventStream(answer, client, call, numbers, service.config.timeout_s)
    return await whole(request, answer, client, call, numbers, service.config.timeout_s)


async def fetch(service: Service, request: Request) -> Response:
    """Return the whole answer of a request that was interrupted by a restart of the server, once it is finished.

    Raises:
        ApiError: this key has no such request, or it could not be continued.
    """
    path, id = request.scope["route"].path.removesuffix("/{id}"), request.path_params["id"]
    journaling = service.journaling
    found = journaling.find(path, service.keys.mark(request.state.holder), id) if journaling is not None else None
    if journaling is None or found is None:
        raise ApiError(404, f"there is no answer with the id {id!r}", param="id")
    key, resumed = found
    body = await resumed.body(request)
    return Response(body, media_type="application/json", background=BackgroundTask(journaling.settle, key))


async def check(service: Service, asked: Asked) -> Asked:
    """Check a request against the model and the engine; return it with `bad_words` as token ids.

    Raises:
        ApiError: it does not fit, or its structured outputs do not compile.
    """
    params, intake = asked.params, service.intake
    try:
        if params.structured_outputs is not None:
            await service.compiler.check(params.structured_outputs)
        if params.bad_words:
            params = await asyncio.to_thread(intake.resolve, params)
        for number, prompt in enumerate(asked.prompts):
            intake.check(number, prompt, params)
        is_met = True
        if params.limits and (wanted := params.structured_outputs) is not None:
            is_met = await service.compiler.ask(partial(Grammars.admits, wanted=wanted, params=params), wanted.kind)
        intake.check_limits(params, is_met)
    except ConfigError as error:
        raise asked.body.refusal(error) from error
    return replace(asked, params=params)


def _check_load(service: Service, asked: Asked) -> None:
    """Check that a request's outputs may wait.

    Raises:
        ApiError: it has a priority that the scheduler does not use, too many outputs, or too many requests wait.
    """
    body = asked.body
    if body.priority and not service.has_priorities:
        raise ApiError(400, "priority: only with scheduler.order=priority on the server", param="priority")
    most, wanted, waiting = service.config.max_waiting, len(asked.prompts) * body.n, service.client.num_waiting
    if wanted > most:
        field = "n" if body.n > 1 else body.prompt_field
        text = f"{field}: {wanted} outputs in one request; at most serve.max_waiting={most} are accepted"
        raise ApiError(400, text, param=field)
    if waiting + wanted > most:
        text = f"The server is overloaded: {waiting} requests are waiting (serve.max_waiting={most})."
        raise ApiError(429, text, code="rate_limit_exceeded", headers=_RETRY_AFTER, is_overload=True)


def set_standing(call: Call, service: Service, holder: str, body: SamplingBody) -> None:
    """Set the user, cache salt and priority of a call by the `holder` of a key."""
    config = service.config
    call.user = holder if holder and config.share_by == "key" else body.user or ""
    # The length prefix keeps a client's salt from imitating another key's.
    salt = body.cache_salt or ""
    call.cache_salt = f"{len(holder)} {holder} {salt}" if config.isolate_keys else salt
    call.priority = body.priority
