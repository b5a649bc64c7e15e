"""The server's endpoints, one row each."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from starlette.responses import Response

from .endpoints import chat, completions, health, live, messages, models, responses, tokens
from .errors import ApiError
from .generate import fetch, generate
from .messages_input import MessagesBody
from .requests import ChatBody, CompletionBody, DetokenizeBody, ResponseBody, TokenizeBody
from .route import JSON, TEXT, Route

_REPLICA = {"type": "integer", "minimum": 0, "default": 0}
_SECONDS = {"type": "number", "minimum": 0.1, "maximum": live.LONGEST_S}

_open = partial(Route, needs_key=False)
_generating = partial(Route, method="POST", handler=generate, answer=JSON | {"text/event-stream": TEXT})
_GENERATING = (
    _generating(
        path="/v1/completions",
        summary="Continue one or several prompts",
        body=CompletionBody,
        ask=completions.ask,
        operation="text_completion",
    ),
    _generating(path="/v1/chat/completions", summary="Answer the messages of a chat", body=ChatBody, ask=chat.ask),
    _generating(
        path="/v1/responses",
        summary="Answer a conversation",
        body=ResponseBody,
        ask=responses.ask,
        refused_stream=responses.refused_stream,
    ),
    _generating(
        path="/v1/messages",
        summary="Answer Anthropic's messages",
        body=MessagesBody,
        ask=messages.ask,
        errors="anthropic",
    ),
)
GENERATING = {route.path: route for route in _GENERATING}
ROUTES = (
    *_GENERATING,
    Route(
        path="/v1/messages/count_tokens",
        handler=messages.count_tokens,
        method="POST",
        body=MessagesBody,
        errors="anthropic",
    ),
    *(Route(path=each.path + "/{id}", handler=fetch, errors=each.errors) for each in _GENERATING),
    Route(path="/tokenize", handler=tokens.tokenize, method="POST", body=TokenizeBody),
    Route(path="/detokenize", handler=tokens.detokenize, method="POST", body=DetokenizeBody),
    Route(path="/tokenizer_info", handler=tokens.tokenizer_info),
    Route(path="/v1/models", handler=models.list_models),
    Route(path="/v1/models/{name:path}", handler=models.find_model),
    _open(path="/health", handler=health.ready, is_quiet=True, answer=health.STATE),
    _open(path="/health/ready", handler=health.ready, is_quiet=True, answer=health.STATE),
    _open(path="/health/live", handler=health.live, is_quiet=True, answer=health.STATE),
    _open(path="/metrics", handler=health.metrics, is_quiet=True, answer={"text/plain": TEXT}),
    _open(path="/load", handler=health.load, is_quiet=True),
    _open(path="/version", handler=health.version, is_quiet=True),
    _open(path="/", handler=live.page, is_quiet=True, is_documented=False),
    _open(path="/page/{name}", handler=live.page_file, is_quiet=True, is_documented=False),
    Route(path="/live/events", handler=live.events, query={"replica": _REPLICA}, is_documented=False),
    Route(path="/record", handler=live.record, method="POST", query={"seconds": _SECONDS, "replica": _REPLICA}),
    _open(path="/recordings/{token}/{name}", handler=live.recorded_file, is_documented=False),
)
_ANTHROPIC = tuple(route.path for route in ROUTES if route.errors == "anthropic")


def error_response(error: ApiError, scope: Mapping[str, Any]) -> Response:
    """Return the answer to an ASGI scope's request, in the format of the API that its path belongs to."""
    error.request_id = scope.get("state", {}).get("request_id", error.request_id)
    return error.response("anthropic" if is_anthropic(scope.get("path", "")) else "openai")


def is_anthropic(path: str) -> bool:
    """Return whether a path, known or not, belongs to Anthropic's API."""
    return path.startswith(_ANTHROPIC)
