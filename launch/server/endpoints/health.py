"""State, counters and version of the server, without a key."""

from __future__ import annotations

from importlib import metadata

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from ..json_response import json_response
from ..route import TEXT
from ..service import Service

STATE = {
    "application/json": {
        "type": "object",
        "required": ["status", "reason"],
        "properties": {"status": TEXT, "reason": TEXT},
    }
}


async def live(service: Service, request: Request) -> Response:
    """Report that the server's process is alive."""
    return json_response({"status": "live", "reason": "the process answers"})


async def ready(service: Service, request: Request) -> Response:
    """Report whether requests are accepted: 503 while the engine starts, recovers or drains, or after it failed."""
    client = service.client
    return json_response({"status": client.state, "reason": client.reason}, 200 if client.state == "ready" else 503)


async def metrics(service: Service, request: Request) -> Response:
    """Return the metrics for Prometheus."""
    return Response(generate_latest(service.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})


async def load(service: Service, request: Request) -> Response:
    """Return the number of unfinished requests."""
    return json_response({"server_load": service.client.num_unfinished})


async def version(service: Service, request: Request) -> Response:
    """Return the version of gapless."""
    return json_response({"version": metadata.version("gapless")})
