"""Errors of the HTTP front, with OpenAI's body: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

TOO_LONG = "context_length_exceeded"  # OpenAI's code, at which clients cut the prompt and try again
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """Ends a request with a status and one line that says what is wrong.

    `param` is the field of the request that is wrong, `code` OpenAI's word for the error where it has one.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        """The error in OpenAI's form."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        # A lone surrogate, quoted from the request, could not be encoded.
        message = self.message.encode(errors="replace").decode()
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def anthropic_body(self) -> dict[str, object]:
        """The error in Anthropic's form."""
        error = self.body["error"]
        kind = "overloaded_error" if self.status == 503 else "api_error" if self.status >= 500 else error["type"]
        return {"type": "error", "error": {"type": kind, "message": error["message"]}}

    def response(self, path: str = "") -> Response:
        """Return the answer with this error's status, headers and body, in the form that belongs to a path."""
        body = self.anthropic_body if path.startswith("/v1/messages") else self.body
        return Response(msgspec.json.encode(body), self.status, self.headers, "application/json")


def given(item: dict[str, Any], key: str, kind: type | tuple[type, ...], where: str) -> Any:
    """Return the value of a key of an item at a place of the body.

    Raises:
        ApiError: it is missing, or of another kind.
    """
    if not isinstance(value := item.get(key), kind):
        words = "an object" if kind is dict else "a text"
        raise ApiError(400, f"{where}.{key}: must be given, as {words}", param=f"{where}.{key}")
    return value
