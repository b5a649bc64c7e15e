"""An endpoint of the server as one object."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from .answers import Asked
    from .body import Body
    from .errors import Api, ApiError
    from .service import Service

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
JSON: dict[str, Schema] = {"application/json": {"type": "object"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """An endpoint. Checks, the OpenAPI document, error formats, logs, metrics and traces derive from it.

    The handler runs once the key, the query and the body are valid. It finds the body in `request.state.body`, and the
    key's holder in `request.state.holder`.
    """

    path: str  # template, also the label in metrics and traces
    handler: Callable[[Service, Request], Awaitable[Response]]
    method: Literal["GET", "POST"] = "GET"
    body: type[Body] | None = None
    query: Mapping[str, Schema] = field(default_factory=dict)  # its parameters; empty: any, which are ignored
    needs_key: bool = True
    errors: Api = "openai"  # whose format errors have, also on unknown paths below this one
    is_quiet: bool = False  # logged at level debug
    is_documented: bool = True  # in the OpenAPI document
    summary: str = ""  # in that document; "": the handler's docstring
    answer: Mapping[str, Schema] = field(default_factory=lambda: JSON)  # in that document, by media type

    # Of endpoints that generate outputs. Their requests count towards the limits of a key.
    ask: Callable[[Service, Any], Awaitable[Asked]] | None = None  # turns the body into a generation request
    operation: str = "chat"  # in traces
    refused_stream: Callable[[Any, ApiError], bytes] | None = None  # the stream that refuses a prompt that is too long

    @property
    def text(self) -> str:
        """The summary in the OpenAPI document."""
        return self.summary or inspect.cleandoc(self.handler.__doc__ or "").partition("\n")[0].rstrip(".")
