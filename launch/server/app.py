"""The paths of the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ...conf.errors import ConfigError
from ...conf.sampling import SamplingParams
from ...conf.serving import ServingConfig
from ...runtime.engine.intake import Intake
from .answers import Answer, ChatAnswer, CompletionAnswer
from .body_limit import BodyLimit
from .chat_template import ChatTemplate, ChatTemplateError
from .engine_client import TAKES_REQUESTS, Call
from .errors import ApiError, of_status
from .fleet import Engine
from .keys import Keys
from .live import Live, LiveStream
from .metrics import Metrics
from .openapi import describe
from .page import add_page
from .recorder import LONGEST_S, Recorder
from .requests import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Message,
    ResponseBody,
    SamplingBody,
    TokenizeBody,
    each_output,
    read,
)
from .responses import ResponseAnswer
from .streaming import EventStream, whole

_LONG_TEXT = 10_000  # characters; longer ones are encoded in a thread, so that no other answer waits
_RETRY_AFTER_S = "1"
_REPLICA = {"name": "replica", "in": "query", "schema": {"type": "integer", "minimum": 0, "default": 0}}
_SECONDS = {"name": "seconds", "in": "query", "schema": {"type": "number", "minimum": 0.1, "maximum": LONGEST_S}}


@dataclass(frozen=True, slots=True)
class Service:
    """What the paths work with."""

    config: ServingConfig
    keys: Keys
    model: str
    max_model_len: int
    intake: Intake
    template: ChatTemplate | None
    client: Engine
    metrics: Metrics
    live: Sequence[Live]  # one of each replica, as the recorders
    recorders: Sequence[Recorder]
    is_local: bool  # only this machine reaches the server


def make_app(service: Service) -> FastAPI:
    """Make the ASGI application."""
    app = FastAPI(title="gapless", version=metadata.version("gapless"), docs_url=None, redoc_url=None)
    app.add_exception_handler(ApiError, _answer_api_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_middleware(BodyLimit, max_bytes=int(service.config.max_body_mib * (1 << 20)))
    _add_health(app, service)
    _add_models(app, service)
    _add_completions(app, service)
    _add_tokens(app, service)
    _add_live(app, service)
    describe(app)
    return app


async def _answer_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return of_status(error.status_code, f"{request.method} {request.url.path}: {error.detail}").response()


def _json(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def _takes(kind: type[BaseModel]) -> dict[str, Any]:
    """The description of a body, for the OpenAPI document."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _add_health(app: FastAPI, service: Service) -> None:
    client = service.client

    @app.get("/health/live")
    async def live() -> Response:
        """The server's process answers."""
        return _json({"status": "live", "reason": "the process answers"})

    @app.get("/health/ready")
    @app.get("/health")
    async def ready() -> Response:
        """Whether requests are taken: 503 while the engine starts, is repaired or drains, or after it failed."""
        return _json({"status": client.state, "reason": client.reason}, 200 if client.state == "ready" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Counters for Prometheus."""
        return Response(generate_latest(service.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    @app.get("/load")
    async def load() -> Response:
        """How many requests are unfinished."""
        return _json({"server_load": client.num_unfinished})

    @app.get("/version")
    async def version() -> Response:
        """The version of gapless."""
        return _json({"version": metadata.version("gapless")})


def _add_models(app: FastAPI, service: Service) -> None:
    created = int(time.time())
    card = {
        "id": service.model, "object": "model", "created": created, "owned_by": "gapless", "root": service.model,
        "parent": None, "max_model_len": service.max_model_len,
    }  # fmt: skip

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        """The one model that is served."""
        _authorize(service, request)
        return _json({"object": "list", "data": [card]})

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        """The model of that name."""
        _authorize(service, request)
        _check_model(service, name)
        return _json(card)


def _add_completions(app: FastAPI, service: Service) -> None:
    tokenizer = service.intake.tokenizer

    @app.post("/v1/completions", openapi_extra=_takes(CompletionBody))
    async def completions(request: Request) -> Response:
        """Continue one or several prompts."""
        holder = _authorize(service, request)
        body = await read(request, CompletionBody)
        if body.suffix:
            raise ApiError(400, "suffix: this server does not offer it", param="suffix")
        if body.best_of not in (None, body.n):
            raise ApiError(400, "best_of: must be n, or absent", param="best_of")
        if body.max_tokens == 0 and not body.echo:
            raise ApiError(400, "max_tokens: must be 1 or more, or 0 with echo", param="max_tokens")
        if body.prompt_logprobs is not None and body.stream:
            raise ApiError(400, "prompt_logprobs: not in a stream", param="prompt_logprobs")
        prompts = await _encode(service, body, body.prompts, body.max_tokens, body.add_special_tokens)
        room = _room(service, prompts, body.max_tokens, "prompt")
        params = body.sampling(max(1, room), body.logprobs, body.num_prompt_logprobs)
        echoes = None
        if body.echo:
            is_cut = body.truncate_prompt_tokens is not None
            echoes = [
                tokenizer.decode(ids) if is_cut or not isinstance(p, str) else p
                for p, ids in zip(body.prompts, prompts, strict=True)
            ]
        answer = CompletionAnswer(
            service.model, prompts, body.n, body.stream_options, tokenizer, echoes=echoes,
            is_echo_only=body.max_tokens == 0, num_prompt_logprobs=body.prompt_logprobs,
            return_token_ids=body.return_token_ids,
        )  # fmt: skip
        return await _run(service, request, holder, body, prompts, params, answer)

    @app.post("/v1/chat/completions", openapi_extra=_takes(ChatBody))
    async def chat(request: Request) -> Response:
        """Answer the messages of a chat."""
        holder = _authorize(service, request)
        body = await read(request, ChatBody)
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs: only with logprobs=true", param="top_logprobs")
        text = _render(service, body.messages, body.add_generation_prompt, body.chat_template_kwargs)
        asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        prompts = await _encode(service, body, [text], asked, body.add_special_tokens)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        params = body.sampling(_room(service, prompts, asked, "messages"), logprobs)
        answer = ChatAnswer(
            service.model, prompts, body.n, body.stream_options, tokenizer, top_logprobs=body.top_logprobs or 0,
            return_token_ids=body.return_token_ids,
        )  # fmt: skip
        return await _run(service, request, holder, body, prompts, params, answer)

    @app.post("/v1/responses", openapi_extra=_takes(ResponseBody))
    async def responses(request: Request) -> Response:
        """Answer a conversation with a message of text."""
        holder = _authorize(service, request)
        body = await read(request, ResponseBody)
        for name in ("previous_response_id", "tools"):
            if getattr(body, name):
                raise ApiError(400, f"{name}: this server does not offer it", param=name)
        if body.n != 1:
            raise ApiError(400, "n: must be 1", param="n")
        text = _render(service, body.messages, True, None)
        prompts = await _encode(service, body, [text], body.max_output_tokens, False)
        params = body.sampling(_room(service, prompts, body.max_output_tokens, "input"), None)
        answer = ResponseAnswer(service.model, prompts, 1, None, tokenizer)
        return await _run(service, request, holder, body, prompts, params, answer)


def _add_live(app: FastAPI, service: Service) -> None:
    add_page(app)

    @app.get("/live/events", include_in_schema=False)
    async def events(request: Request) -> Response:
        """What the pipeline does, as server-sent events without an end."""
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
        return _json(await service.recorders[_replica(service, request)].record(seconds))


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
        """The token ids of a prompt, or of a chat."""
        _authorize(service, request)
        body = await read(request, TokenizeBody)
        _check_model(service, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        special = body.add_special_tokens
        if body.messages is not None:
            text, special = _render(service, body.messages, body.add_generation_prompt, None), False
        else:
            text = body.prompt or ""
        tokens = await _tokens(service, text, special)
        return _json({"tokens": tokens, "count": len(tokens), "max_model_len": service.max_model_len})

    @app.post("/detokenize", openapi_extra=_takes(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        _authorize(service, request)
        body = await read(request, DetokenizeBody)
        _check_model(service, body.model)
        if wrong := [token for token in body.tokens if not 0 <= token < 1 << 31]:
            raise ApiError(400, f"tokens: {wrong[0]} is no token id", param="tokens")
        return _json({"prompt": tokenizer.decode(body.tokens, skip_special=False)})


async def _run(
    service: Service, request: Request, holder: str, body: SamplingBody, prompts: Sequence[Sequence[int]],
    params: SamplingParams, answer: Answer,
) -> Response:  # fmt: skip
    """Send a checked request of a key's `holder` to the engine, and answer with what comes of it."""
    _check_model(service, body.model)
    client = service.client
    if client.state not in TAKES_REQUESTS:
        raise ApiError(503, client.reason, headers={"retry-after": _RETRY_AFTER_S})
    try:
        if params.structured_outputs is not None:  # to compile a grammar may take a while
            await asyncio.to_thread(service.intake.check_structured_outputs, params.structured_outputs)
        if params.bad_words:
            params = await asyncio.to_thread(service.intake.resolve, params)
        for number, prompt in enumerate(prompts):
            service.intake.check(number, prompt, params)
    except ConfigError as error:
        text = str(error).removeprefix("sampling.")
        param = next((name for name in ("structured_outputs", "bad_words") if text.startswith(name)), "prompt")
        raise ApiError(400, text, param=param) from error
    new = len(prompts) * body.n
    if client.num_waiting + new > service.config.max_waiting:
        most = service.config.max_waiting
        text = f"{client.num_waiting} requests wait for their first token, of at most serve.max_waiting={most}"
        raise ApiError(429, text, code="rate_limit_exceeded", headers={"retry-after": _RETRY_AFTER_S})
    call = Call(has_structured_outputs=params.structured_outputs is not None)
    numbers: list[int] = []
    config = service.config
    user = holder if holder and config.share_by == "key" else body.user or ""
    # The length first, so that no salt of a client reads like one of a key.
    salt = f"{len(holder)} {holder} {body.cache_salt or ''}" if config.isolate_keys else body.cache_salt or ""
    deadline = None if body.deadline_ms is None else call.arrival + body.deadline_ms / 1e3
    for prompt in prompts:
        numbers += client.submit(call, prompt, each_output(params, body.n), user, salt, deadline)
    if body.stream:
        return EventStream(answer, client, call, numbers, service.config.timeout_s)
    return await whole(request, answer, client, call, numbers, service.config.timeout_s)


def _authorize(service: Service, request: Request) -> str:
    """Return the name of the request's key.

    Raises:
        ApiError: it bears none of ours.
    """
    holder = service.keys.holder(request.headers.get("authorization", ""))
    if holder is None:
        raise ApiError(
            401, "give a valid API key, as in `Authorization: Bearer KEY`", code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )  # fmt: skip
    return holder


def _check_model(service: Service, name: str | None) -> None:
    if name is not None and name != service.model:
        raise ApiError(
            404, f"the model {name!r} does not exist; this server has {service.model!r}", param="model",
            code="model_not_found",
        )  # fmt: skip


async def _encode(
    service: Service, body: SamplingBody, prompts: Sequence[str | list[int]], max_tokens: int | None, add_special: bool
) -> list[list[int]]:
    """The token ids of prompts, as far as the body wants them with `max_tokens` output tokens behind them."""
    encoded = [p if not isinstance(p, str) else await _tokens(service, p, add_special) for p in prompts]
    longest = max(1, service.max_model_len - max(1, max_tokens or 1))
    return [body.truncated(prompt, longest) for prompt in encoded]


async def _tokens(service: Service, text: str, add_special: bool) -> list[int]:
    """The token ids of a text.

    Raises:
        ApiError: it is no text, or far too long.
    """
    try:
        service.intake.check_text(0, text)
        encode: Callable[[str, bool], list[int]] = service.intake.tokenizer.encode
        if len(text) <= _LONG_TEXT:
            return encode(text, add_special)
        encoding: Awaitable[list[int]] = asyncio.to_thread(encode, text, add_special)
        return await encoding
    except ConfigError as error:
        raise ApiError(400, str(error), param="prompt") from error


def _render(
    service: Service, messages: Sequence[Message], add_generation_prompt: bool, further: dict[str, Any] | None
) -> str:
    """The prompt of a chat.

    Raises:
        ApiError: the model has no chat template, or it refuses the messages.
    """
    if service.template is None:
        raise ApiError(400, "this model has no chat template; use /v1/completions", param="messages")
    try:
        return service.template.render([m.for_template() for m in messages], add_generation_prompt, further)
    except ChatTemplateError as error:
        raise ApiError(400, str(error), param="messages") from error


def _room(service: Service, prompts: Sequence[Sequence[int]], asked: int | None, param: str) -> int:
    """The most output tokens: those that were asked for, or all that the context has room for.

    Raises:
        ApiError: the context cannot hold the prompt and the output.
    """
    context = service.max_model_len
    longest = max((len(prompt) for prompt in prompts), default=0)
    left = context - longest
    if left < 1 or (asked is not None and asked > left):
        over = longest + (asked or 1) - context
        raise ApiError(
            400,
            f"the context of this model is {context} tokens; {longest} in the {param} and {asked or 'at least 1'} for "
            f"the output are {over} too many",
            param=param, code="context_length_exceeded",
        )  # fmt: skip
    return left if asked is None else asked
