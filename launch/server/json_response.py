"""Answers in JSON."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.responses import Response


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return an answer in JSON."""
    return Response(msgspec.json.encode(body), status, headers, "application/json")
