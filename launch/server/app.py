"""The ASGI application: routes requests to their handlers once they are checked, and answers errors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.routing import Route as PathRoute
from starlette.types import Scope

from .body_limit import BodyLimit
from .errors import TOO_LONG, ApiError
from .json_response import json_response
from .openapi import document
from .read_body import read
from .requests import Offers
from .route import Route
from .routes import GENERATING, ROUTES, error_response
from .service import Service


def make_app(service: Service, routes: Sequence[Route] = ROUTES) -> Starlette:
    """Make the ASGI application."""

    @cache
    def documented() -> dict[str, Any]:
        return document(routes)

    async def openapi(service: Service, request: Request) -> Response:
        return json_response(documented())

    rows = [*routes, Route(path="/openapi.json", handler=openapi, needs_key=False)]
    return Starlette(
        routes=[_Endpoint(service, row) for row in rows],
        middleware=[Middleware(BodyLimit, max_bytes=int(service.config.max_body_mib * (1 << 20)))],
        exception_handlers={
            ApiError: _answer_api_error,
            HTTPException: _answer_http_error,
            Exception: _answer_fault,
        },
    )


class _Endpoint(PathRoute):
    """Checks a request's key, query and body, then calls the handler."""

    def __init__(self, service: Service, route: Route) -> None:
        super().__init__(route.path, self._answer, methods=[route.method])
        self._service = service
        self._route = route

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match a request, and name the route for handlers and logs."""
        match, found = super().matches(scope)
        return match, {**found, "route": self._route}

    async def _answer(self, request: Request) -> Response:
        service, route = self._service, self._route
        if route.needs_key:
            request.state.holder = _holder(service, request)
        if route.query and (unknown := [name for name in request.query_params if name not in route.query]):
            text = f"{unknown[0]!r}: not a query parameter of {route.path}; must be {' or '.join(route.query)}"
            raise ApiError(400, text, param=unknown[0])
        if route.body is not None:
            body: Any = await read(request, route.body)
            request.state.body = body
            if isinstance(body, Offers):
                request.state.ignored_tools = service.unknown.note_tools(route.path, body.ignored_tools)
            service.unknown.note(route.path, getattr(request.state, "ignored", ()), service.config.strict)
            service.check_model(body.model)
        return await route.handler(service, request)


def _holder(service: Service, request: Request) -> str:
    """Return the holder of the request's key.

    Raises:
        ApiError: it has no valid key.
    """
    given = request.headers.get("authorization") or f"Bearer {request.headers.get('x-api-key', '')}"
    if (holder := service.keys.holder(given)) is not None:
        return holder
    is_absent = given == "Bearer "
    said = "You didn't provide an API key" if is_absent else "Incorrect API key provided"
    raise ApiError(
        401,
        f"{said}; give a valid one, as in `Authorization: Bearer KEY`.",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
        anthropic="x-api-key header is required" if is_absent else "invalid x-api-key",
    )


async def _answer_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    request.state.error, request.state.field = error.message, error.param
    refused, body = request.scope["route"].refused_stream, getattr(request.state, "body", None)
    if error.code == TOO_LONG and refused is not None and body is not None and body.stream:
        request.state.failed = error.status
        return Response(refused(body, error), media_type="text/event-stream")
    return error_response(error, request.scope)


async def _answer_fault(request: Request, error: Exception) -> Response:
    return error_response(ApiError(500, "internal error; the server's log has the traceback"), request.scope)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers, why = dict(error.headers or {}), error.detail
    if error.status_code == 405:
        method = request.scope["route"].method
        methods = "GET, HEAD" if method == "GET" else method
        headers["Allow"], why = f"{methods}, OPTIONS", f"this path takes {methods}"
        if request.method == "OPTIONS":
            return Response(status_code=204, headers=headers)
    if error.status_code == 404:  # as /v1/embeddings, /rerank, /api/chat
        paths = ", ".join(GENERATING)
        why = f"no such path; this server generates text, by POST to {paths} (/openapi.json: all)"
    text = f"{request.method} {request.url.path}: {why}"
    return error_response(ApiError(error.status_code, text, headers=headers), request.scope)
