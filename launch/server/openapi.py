"""What `/openapi.json` says beside paths and bodies: the answers of each path, and its errors."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


_TEXT, _MAYBE = {"type": "string"}, {"type": ["string", "null"]}
_ERROR = _object(error=_object(message=_TEXT, type=_TEXT, param=_MAYBE, code=_MAYBE))
_HEALTH = _object(status=_TEXT, reason=_TEXT)
_ERRORS = {
    "400": "The body is wrong, or does not fit into the context; the message names the field.",
    "401": "No valid API key.",
    "404": "Another model's name.",
    "408": "The request was not complete in time.",
    "413": "The body is too large.",
    "429": "Too many requests wait; try again after `Retry-After` seconds.",
    "431": "The first line and the headers are too large.",
    "500": "The model's logits are not finite.",
    "503": "The engine starts, drains or has failed, or too many connections are open.",
    "504": "The answer was not complete in time.",
}
_STREAMED = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
_OF_ALL = ("400", "408", "413", "431", "503")  # also where a request is no HTTP


def describe(app: FastAPI) -> None:
    """Add answers and errors to the document that FastAPI makes of the paths."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _complete(make())
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(document: dict[str, Any]) -> None:
    schemas: dict[str, Any] = {"Error": _ERROR}
    document["components"] = {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            is_closed = path.startswith("/v1/") or path.endswith("tokenize")
            if "requestBody" in operation:
                schema = operation["requestBody"]["content"]["application/json"]["schema"]
                schemas.update(schema.pop("$defs", {}))
            if is_closed:
                operation["security"] = [{}, {"key": []}]
            operation["responses"] = _responses(path, is_closed, has_body="requestBody" in operation)


def _responses(path: str, is_closed: bool, has_body: bool) -> dict[str, Any]:
    whole = _HEALTH if path.startswith("/health") else {"type": "object"}
    content: dict[str, Any] = {"application/json": {"schema": whole}}
    if path == "/metrics":
        content = {"text/plain": {"schema": {"type": "string"}}}
    elif path in _STREAMED:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    statuses = {*_OF_ALL}
    if is_closed:
        statuses |= {"401"}
    if has_body or "{name}" in path:
        statuses |= {"404"}
    if path in _STREAMED:
        statuses |= {"429", "500", "504"}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    found: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    for status in sorted(statuses):
        found[status] = {"description": _ERRORS[status], "content": error}
    if path in ("/health", "/health/ready"):
        is_either = {"anyOf": [_HEALTH, {"$ref": "#/components/schemas/Error"}]}
        found["503"] = {"description": _ERRORS["503"], "content": {"application/json": {"schema": is_either}}}
    return found
