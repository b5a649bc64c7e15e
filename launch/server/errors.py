"""Errors of the HTTP front, with the texts, types and statuses of the original APIs, because clients match them."""

from __future__ import annotations

from typing import Any, Literal

from starlette.responses import Response

from .json_response import json_response

Api = Literal["openai", "anthropic"]
TOO_LONG = "context_length_exceeded"  # OpenAI's code; clients then shorten the prompt and retry
_RESPONSES_FIRST = "Your input exceeds the context window of this model. "  # with `input`, by OpenAI
_OVERLOADED = 529  # Anthropic's status for 503
_OPENAI_TYPES = {429: "requests"}  # by status; else invalid_request_error, or server_error for 5xx
_ANTHROPIC_TYPES = {
    **{401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"},
    **{429: "rate_limit_error", 504: "timeout_error", _OVERLOADED: "overloaded_error"},
}  # else invalid_request_error, or api_error for 5xx

_DETAILS = {"thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}  # by field


class ApiError(Exception):
    """Ends a request with a status and a one-line message.

    Args:
        param: the field of the request that is wrong.
        code: OpenAI's error code, if any.
        anthropic: Anthropic's message, if it differs.
        is_overload: Anthropic's status is 529 (overloaded).

    Attributes:
        request_id: the request's id; part of Anthropic's format.
    """

    request_id = ""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        anthropic: str = "",
        is_overload: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers
        self.anthropic = anthropic or message
        self._is_overload = is_overload or status == 503

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        """The error in OpenAI's format."""
        kind = _OPENAI_TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": _text(self.message), "type": kind, "param": self.param, "code": self.code}}

    @property
    def anthropic_status(self) -> int:
        """The status of Anthropic's API."""
        return _OVERLOADED if self._is_overload else self.status

    @property
    def anthropic_body(self) -> dict[str, object]:
        """The error in Anthropic's format."""
        status = self.anthropic_status
        kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        error: dict[str, object] = {"type": kind, "message": _text(self.anthropic)}
        error |= {"details": _DETAILS[self.param]} if self.param in _DETAILS else {}
        return {"type": "error", "error": error, "request_id": self.request_id or None}

    def response(self, api: Api = "openai") -> Response:
        """Return the answer in the format of an API."""
        if api == "anthropic":
            return json_response(self.anthropic_body, self.anthropic_status, self.headers)
        return json_response(self.body, self.status, self.headers)


def _text(message: str) -> str:
    return message.encode(errors="replace").decode()  # a lone surrogate, quoted from the request, has no encoding


def too_long(prompt: int, output: int, limit: int, field: str, length_field: str, cause: str = "") -> ApiError:
    """Return the error for a prompt and output that exceed the context, in the sentences that clients match.

    Args:
        prompt: number of prompt tokens.
        output: number of requested output tokens.
        limit: maximum number of tokens.
        field: the field with the prompt.
        length_field: the field that limits the output.
        cause: an additional sentence.
    """
    text = _RESPONSES_FIRST if field == "input" else ""
    text += (
        f"This model's maximum context length is {limit} tokens. However, you requested {prompt + output} tokens "
        f"({prompt} in the {field}, {output} in the completion). Please reduce the length of the {field} or completion."
    )
    anthropic = (
        f"input length and `max_tokens` exceed context limit: {prompt} + {output} > {limit}, "
        "decrease input length or `max_tokens` and try again"
        if prompt < limit
        else f"prompt is too long: {prompt} tokens > {limit - 1} maximum"
    )
    cause = cause and f" {cause}"
    param = length_field if output >= limit else field  # then no prompt is short enough
    return ApiError(400, text + cause, param=param, code=TOO_LONG, anthropic=anthropic + cause)


def given(item: dict[str, Any], key: str, kind: type | tuple[type, ...], where: str) -> Any:
    """Return the value of an item's key; `where` is the item's place in the body.

    Raises:
        ApiError: it is missing or has another type.
    """
    if not isinstance(value := item.get(key), kind):
        words = "an object" if kind is dict else "a string"
        raise ApiError(400, f"{where}.{key}: required; must be {words}", param=f"{where}.{key}")
    return value
