"""The served model, by each of its names."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..json_response import json_response
from ..service import Service

_CREATED = int(time.time())


async def list_models(service: Service, request: Request) -> Response:
    """Return the served model, by each of its names."""
    return json_response({"object": "list", "data": [_card(service, name) for name in service.names]})


async def find_model(service: Service, request: Request) -> Response:
    """Return the model of that name."""
    name = request.path_params["name"]
    service.check_model(name)
    return json_response(_card(service, name))


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": _CREATED,
        "owned_by": "gapless",
        "root": service.model,
        "parent": None,
        "max_model_len": service.max_model_len,
    }
