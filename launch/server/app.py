"""The paths of the server."""

from __future__ import annotations

import re
import time
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ...runtime.serving.journal import Accepted
from .body import Body
from .body_limit import BodyLimit
from .endpoints import (
    MESSAGES,
    ROUTES,
    Route,
    ask_messages,
    check,
    check_model,
    encode_text,
    render,
    set_standing,
)
from .engine_client import TAKES_REQUESTS, Call
from .errors import TOO_LONG, ApiError
from .live import LiveStream
from .live_page import add_page
from .messages_input import MessagesBody
from .openapi import describe
from .read_body import read
from .recorder import LONGEST_S
from .requests import DetokenizeBody, Offers, ResponseBody, TokenizeBody, each_output
from .responses import refused_stream
from .service import Service
from .streaming import EventStream, whole

B = TypeVar("B", bound=Body)
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_RETRY_AFTER_S = "1"
_REPLICA = {"name": "replica", "in": "query", "schema": {"type": "integer", "minimum": 0, "default": 0}}
_SECONDS = {"name": "seconds", "in": "query", "schema": {"type": "number", "minimum": 0.1, "maximum": LONGEST_S}}


def make_app(service: Service) -> FastAPI:
    """Make the ASGI application."""
    app = FastAPI(title="gapless", version=metadata.version("gapless"), docs_url=None, redoc_url=None)
    _answer_errors(app)
    app.add_middleware(BodyLimit, max_bytes=int(service.config.max_body_mib * (1 << 20)))
    _add_health(app, service)
    _add_models(app, service)
    _add_completions(app, service)
    _add_tokens(app, service)
    _add_live(app, service)
    describe(app)
    return app


def _answer_errors(app: FastAPI) -> None:
    app.add_exception_handler(ApiError, _answer_api_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(Exception, _answer_fault)


async def _answer_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    request.state.error, request.state.field = error.message, error.param
    body = getattr(request.state, "body", None)
    if error.code == TOO_LONG and isinstance(body, ResponseBody) and body.stream:
        request.state.failed = error.status
        return Response(refused_stream(body, error), media_type="text/event-stream")
    return error.response(request.scope)


async def _answer_fault(request: Request, error: Exception) -> Response:
    return ApiError(500, "the server failed at this request; its log says where").response(request.scope)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers, why = dict(error.headers or {}), error.detail
    if "Allow" in headers:
        methods = headers["Allow"].replace("GET", "GET, HEAD")
        headers["Allow"], why = f"{methods}, OPTIONS", f"this path takes {methods}"
        if request.method == "OPTIONS":
            return Response(status_code=204, headers=headers)
    if error.status_code == 404:  # as /v1/embeddings, /rerank, /api/chat
        why = f"there is no such path; this server generates text, by POST to {', '.join(ROUTES)} (/openapi.json: all)"
    text = f"{request.method} {request.url.path}: {why}"
    return ApiError(error.status_code, text, headers=headers).response(request.scope)


def _json(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def _takes(kind: type[BaseModel]) -> dict[str, Any]:
    """Return the description of a body, for the OpenAPI document."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _add_health(app: FastAPI, service: Service) -> None:
    client = service.client

    @app.get("/health/live")
    async def live() -> Response:
        """Answer that the server's process lives."""
        return _json({"status": "live", "reason": "the process answers"})

    @app.get("/health/ready")
    @app.get("/health")
    async def ready() -> Response:
        """Return whether requests are taken: 503 while the engine starts, is repaired or drains, or after it failed."""
        return _json({"status": client.state, "reason": client.reason}, 200 if client.state == "ready" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return the counters for Prometheus."""
        return Response(generate_latest(service.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    @app.get("/load")
    async def load() -> Response:
        """Return how many requests are unfinished."""
        return _json({"server_load": client.num_unfinished})

    @app.get("/version")
    async def version() -> Response:
        """Return the version of gapless."""
        return _json({"version": metadata.version("gapless")})


def _add_models(app: FastAPI, service: Service) -> None:
    created = int(time.time())

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "gapless",
            "root": service.model,
            "parent": None,
            "max_model_len": service.max_model_len,
        }

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        """Return the one model that is served, by each of its names."""
        _authorize(service, request)
        return _json({"object": "list", "data": [card(name) for name in service.names]})

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        """Return the model of that name."""
        _authorize(service, request)
        check_model(service, name)
        return _json(card(name))


def _add_completions(app: FastAPI, service: Service) -> None:
    def add(route: Route) -> None:
        @app.post(route.path, openapi_extra=_takes(route.body), summary=route.does)
        async def run(request: Request) -> Response:
            return await _run(service, request, route)

        @app.get(route.path + "/{id}")
        async def fetch(request: Request, id: str) -> Response:
            """Return the whole answer of a request that an end of the server interrupted."""
            return await _fetch(service, request, route, id)

    for route in ROUTES.values():
        add(route)

    @app.post(MESSAGES.path + "/count_tokens", openapi_extra=_takes(MessagesBody))
    async def count_tokens(request: Request) -> Response:
        """Return how many tokens the prompt of Anthropic's messages has."""
        _authorize(service, request)
        body = await _read(service, request, MessagesBody)
        check_model(service, body.model)
        ((tokens,), _) = await ask_messages(service, body, body.max_tokens)
        return _json({"input_tokens": len(tokens)})


def _add_live(app: FastAPI, service: Service) -> None:
    add_page(app)
    service.recordings.add_paths(app)

    @app.get("/live/events", include_in_schema=False, openapi_extra={"parameters": [_REPLICA]})
    async def events(request: Request) -> Response:
        """Return what the pipeline does, as server-sent events without an end."""
        _authorize(service, request)
        return LiveStream(service.live[_replica(service, request)])

    @app.post("/record", openapi_extra={"parameters": [_SECONDS, _REPLICA]})
    async def record(request: Request) -> Response:
        """Record what the pipeline does as a run folder; answers when it is written."""
        _authorize(service, request)
        if not service.keys.are_set and not service.is_local:
            text = "other machines reach this server, and a recording writes to its disk; set serve.api_keys"
            raise ApiError(403, text)
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise ApiError(403, "a page of another site asked for the recording")
        text = request.query_params.get("seconds", "30")
        try:
            seconds = float(text)
        except ValueError:
            seconds = 0.0
        if not 0.1 <= seconds <= LONGEST_S:
            raise ApiError(400, f"seconds: must be a number from 0.1 to {LONGEST_S:g}, not {text!r}", param="seconds")
        found = await service.recorders[_replica(service, request)].record(seconds)
        return _json(found | {"url": service.recordings.add(Path(found["folder"]))})


def _replica(service: Service, request: Request) -> int:
    """Return the number of the replica that a request asks for: the first if it names none.

    Raises:
        ApiError: there is none of that number.
    """
    text, count = request.query_params.get("replica", "0"), len(service.client.replicas)
    if text not in map(str, range(count)):
        raise ApiError(400, f"replica: must be from 0 to {count - 1}, not {text!r}", param="replica")
    return int(text)


def _add_tokens(app: FastAPI, service: Service) -> None:
    tokenizer = service.intake.tokenizer

    @app.post("/tokenize", openapi_extra=_takes(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        """Return the token ids of a prompt, or of a chat."""
        _authorize(service, request)
        body = await _read(service, request, TokenizeBody)
        check_model(service, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        if body.prompt is None:
            text, _ = await render(service, body, body.tool_set)
            tokens = await encode_text(service, text, False, body.prompt_field)
        else:
            tokens = await encode_text(service, body.prompt, body.add_special_tokens, "prompt")
        return _json({"tokens": tokens, "count": len(tokens), "max_model_len": service.max_model_len})

    @app.get("/tokenizer_info")
    async def tokenizer_info(request: Request) -> Response:
        """Return the tokenizer's tokenizer_config.json, without its chat template."""
        _authorize(service, request)
        return _json({key: value for key, value in service.intake.tokenizer_config.items() if key != "chat_template"})

    @app.post("/detokenize", openapi_extra=_takes(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """Return the text of token ids."""
        _authorize(service, request)
        body = await _read(service, request, DetokenizeBody)
        check_model(service, body.model)
        if wrong := [token for token in body.tokens if not 0 <= token < 1 << 31]:
            raise ApiError(400, f"tokens: {wrong[0]} is no token id", param="tokens")
        return _json({"prompt": tokenizer.decode(body.tokens, skip_special=False)})


async def _run(service: Service, request: Request, route: Route) -> Response:
    """Send a request to the engine, and answer with what comes of it.

    Raises:
        ApiError: it is wrong, or cannot be taken now.
    """
    holder = _authorize(service, request)
    body = request.state.body = await _read(service, request, route.body)
    check_model(service, body.model)
    asked = await route.ask(service, body)
    request.state.asked = asked
    answer, id, journaling = asked.answer, request.state.request_id, service.journaling
    is_named = request.headers.get("x-request-id") == id
    if _ID.fullmatch(id):
        answer.id = answer.prefix + id
    elif journaling is not None:
        raise ApiError(400, "X-Request-Id: with serve.journal, must be 1 to 128 letters, digits, dots, colons, - or _")
    client = service.client
    if client.state not in TAKES_REQUESTS:
        raise ApiError(503, client.reason, headers={"retry-after": _RETRY_AFTER_S})
    asked = await check(service, asked)
    if body.priority and not service.has_priorities:
        raise ApiError(400, "priority: only where the server has scheduler.order=priority", param="priority")
    most, wanted = service.config.max_waiting, len(asked.prompts) * body.n
    if wanted > most:
        field = "n" if body.n > 1 else body.prompt_field
        text = f"{field}: {wanted} outputs in one request; serve.max_waiting={most} is the most"
        raise ApiError(400, text, param=field)
    if client.num_waiting + wanted > most:
        text = f"The server is overloaded: {client.num_waiting} requests wait (serve.max_waiting={most})."
        headers = {"retry-after": _RETRY_AFTER_S}
        raise ApiError(429, text, code="rate_limit_exceeded", headers=headers, is_overload=True)
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
    if journaling is not None and (body.stream or is_named):  # else its client cannot name it
        accepted = Accepted(answer.id, owner, route.path, given, answer.created, numbers)
        journaling.accept(accepted, asked, call)
    if body.stream:
        return EventStream(answer, client, call, numbers, service.config.timeout_s)
    return await whole(request, answer, client, call, numbers, service.config.timeout_s)


async def _read(service: Service, request: Request, kind: type[B]) -> B:
    """Read a body, as `read`, and say which of its fields nobody knows.

    Raises:
        ApiError: it is wrong, or has such fields where the server is strict.
    """
    body = await read(request, kind)
    if isinstance(body, Offers):
        request.state.ignored_tools = service.unknown.note_tools(request.url.path, body.ignored_tools)
    service.unknown.note(request.url.path, getattr(request.state, "ignored", ()), service.config.strict)
    return body


async def _fetch(service: Service, request: Request, route: Route, id: str) -> Response:
    """Answer with the outputs of a request that was resumed from the journal, once they have ended.

    Raises:
        ApiError: there is no such request of this key, or it could not go on.
    """
    holder = _authorize(service, request)
    journaling = service.journaling
    found = journaling.find(route.path, service.keys.mark(holder), id) if journaling is not None else None
    if journaling is None or found is None:
        raise ApiError(404, f"there is no answer of the id {id!r}", param="id")
    key, resumed = found
    body = await resumed.body(request)
    return Response(body, media_type="application/json", background=BackgroundTask(journaling.settle, key))


def _authorize(service: Service, request: Request) -> str:
    """Return the name of the request's key.

    Raises:
        ApiError: it bears none of ours, or its path has query parameters and not the given one.
    """
    given = request.headers.get("authorization") or f"Bearer {request.headers.get('x-api-key', '')}"
    holder = service.keys.holder(given)
    if holder is None:
        is_absent = given == "Bearer "
        said = "You didn't provide an API key" if is_absent else "Incorrect API key provided"
        raise ApiError(
            401,
            f"{said}; give a valid one, as in `Authorization: Bearer KEY`.",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
            anthropic="x-api-key header is required" if is_absent else "invalid x-api-key",
        )
    request.state.holder = holder
    known = [each["name"] for each in (request.scope["route"].openapi_extra or {}).get("parameters", ())]
    if known and (unknown := [name for name in request.query_params if name not in known]):
        text = f"{unknown[0]!r}: no query parameter of {request.url.path}; must be {' or '.join(known)}"
        raise ApiError(400, text, param=unknown[0])
    return holder
