"""The document of `/openapi.json`, from the routes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import metadata
from typing import Any

from .route import JSON, TEXT, Route, Schema


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "required": list(properties), "properties": properties}


_MAYBE = {"type": ["string", "null"]}
_ERROR = _object(error=_object(message=TEXT, type=TEXT, param=_MAYBE, code=_MAYBE))
_ERRORS = {
    "400": "The body is invalid, or exceeds the context length; the message names the field.",
    "401": "No valid API key.",
    "404": "Another model's name, or an unknown name or id in the path.",
    "408": "The request was not complete in time.",
    "413": "The body is too large.",
    "429": "Too many requests are waiting; try again after `Retry-After` seconds.",
    "431": "The first line and the headers are too large.",
    "500": "The model's logits are not finite.",
    "503": "The engine starts, drains or has failed, or too many connections are open.",
    "504": "The answer was not complete in time.",
}
_OF_ALL = ("400", "408", "413", "431", "503")  # also for requests that are not valid HTTP


def document(routes: Iterable[Route]) -> dict[str, Any]:
    """Return the OpenAPI document of an API's routes."""
    schemas: dict[str, Any] = {"Error": _ERROR}
    paths: dict[str, Any] = {}
    for route in routes:
        if route.is_documented:
            path = re.sub(r":\w+}", "}", route.path)
            paths.setdefault(path, {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "gapless", "version": metadata.version("gapless")},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(route: Route, schemas: dict[str, Any]) -> dict[str, Any]:
    """Describe a route; the definitions that its body needs are added to `schemas`."""
    names = re.findall(r"{(\w+)", route.path)
    parameters = [{"name": name, "in": "path", "required": True, "schema": TEXT} for name in names]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in route.query.items()]
    found: dict[str, Any] = {"summary": route.text, "responses": _responses(route)}
    found |= {"parameters": parameters} if parameters else {}
    found |= {"security": [{}, {"key": []}]} if route.needs_key else {}
    if route.body is not None:
        schema = route.body.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return found


def _responses(route: Route) -> dict[str, Any]:
    statuses = {*_OF_ALL}
    statuses |= {"401"} if route.needs_key else set()
    statuses |= {"404"} if route.body is not None or "{" in route.path else set()
    statuses |= {"429", "500", "504"} if route.ask is not None else set()
    content = {kind: {"schema": schema} for kind, schema in route.answer.items()}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    found: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    found |= {status: {"description": _ERRORS[status], "content": error} for status in sorted(statuses)}
    if (state := route.answer.get("application/json")) not in (None, JSON["application/json"]):  # also of a 503
        either = {"anyOf": [state, error["application/json"]["schema"]]}
        found["503"] = {"description": _ERRORS["503"], "content": {"application/json": {"schema": either}}}
    return found
