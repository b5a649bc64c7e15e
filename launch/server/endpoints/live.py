"""The live page at `/`, its events, and recordings.

The page loads nothing from other sites and runs only its own scripts. It needs no API key; its events do.
"""

from __future__ import annotations

import mimetypes
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from ..errors import ApiError
from ..json_response import json_response
from ..service import Service

if TYPE_CHECKING:
    from ..monitor.monitor import Monitor

LONGEST_S = 600.0

_KINDS = {"html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}
_OF_REPORTS = ("page.css", "timeline_style.js")  # shared with reports: cause colours, hatches, time formatting
_SAFE = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
_PAGE_HEADERS = _SAFE | {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
}
_RECORDING_HEADERS = _SAFE | {
    # The page's scripts have no access to this server's origin.
    "content-security-policy": "sandbox allow-scripts allow-popups allow-downloads",
    "cache-control": "no-store",
}


@cache
def page_files() -> dict[str, bytes]:
    """Return the page's files by name; the page itself is `index.html`."""
    from ....runtime.analysis.drawing.page_parts import template

    own = resources.files("gapless.launch.server").joinpath("page")
    found = {file.name: file.read_bytes() for file in own.iterdir() if file.name.rpartition(".")[2] in _KINDS}
    return found | {name: template(name).encode() for name in _OF_REPORTS}


async def page(service: Service, request: Request) -> Response:
    """Return the live page."""
    _monitor(service)
    return _page_file("index.html")


async def page_file(service: Service, request: Request) -> Response:
    """Return a file of the live page."""
    _monitor(service)
    name = request.path_params["name"]
    if name not in page_files():
        raise ApiError(404, f"GET /page/{name}: Not Found")
    return _page_file(name)


async def events(service: Service, request: Request) -> Response:
    """Return the pipeline's state as an endless stream of server-sent events."""
    monitor = _monitor(service)
    from ..monitor.live import LiveStream

    return LiveStream(monitor.live[_replica(service, request)])


async def record(service: Service, request: Request) -> Response:
    """Record the pipeline as a run folder; answers when it is written."""
    monitor = _monitor(service)
    if not service.keys.are_set and not service.is_local:
        text = "other machines can reach this server, and a recording writes to its disk; set serve.api_keys"
        raise ApiError(403, text)
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise ApiError(403, "a recording cannot be requested by a page of another site")
    text = request.query_params.get("seconds", "30")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= LONGEST_S:
        raise ApiError(400, f"seconds: must be a number from 0.1 to {LONGEST_S:g}, not {text!r}", param="seconds")
    found = await monitor.recorders[_replica(service, request)].record(seconds)
    return json_response(found | {"url": monitor.recordings.add(Path(found["folder"]))})


async def recorded_file(service: Service, request: Request) -> Response:
    """Return a file of a recording."""
    path = _monitor(service).recordings.find(**request.path_params)
    if path is None:
        raise ApiError(404, "no recording has this file")
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return FileResponse(path, headers={**_RECORDING_HEADERS, "content-type": kind})


def _monitor(service: Service) -> Monitor:
    """Return what shows the run.

    Raises:
        ApiError: it is not installed.
    """
    if service.monitor is None:
        raise ApiError(501, "the live page and recordings need gapless.runtime.analysis, which is not installed")
    return service.monitor


def _page_file(name: str) -> Response:
    return Response(page_files()[name], headers={**_PAGE_HEADERS, "content-type": _KINDS[name.rpartition(".")[2]]})


def _replica(service: Service, request: Request) -> int:
    """Return the number of the requested replica; by default the first.

    Raises:
        ApiError: there is no such replica.
    """
    text, count = request.query_params.get("replica", "0"), len(service.client.replicas)
    if text not in map(str, range(count)):
        raise ApiError(400, f"replica: must be from 0 to {count - 1}, not {text!r}", param="replica")
    return int(text)
