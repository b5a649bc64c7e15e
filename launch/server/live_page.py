"""The live page at `/` and its files. It loads nothing from elsewhere and runs no script but its own."""

from __future__ import annotations

from importlib import resources

from fastapi import FastAPI
from starlette.responses import Response

from ...runtime.drawing.page_parts import template
from .errors import ApiError

_KINDS = {"html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_OF_REPORTS = ("page.css", "timeline_drawing.js")  # colours of causes, hatches, times as text


def page_files() -> dict[str, bytes]:
    """Return the page's files by name; the page itself is `index.html`."""
    own = resources.files(__package__).joinpath("page")
    found = {file.name: file.read_bytes() for file in own.iterdir() if file.name.rpartition(".")[2] in _KINDS}
    return found | {name: template(name).encode() for name in _OF_REPORTS}


def add_page(app: FastAPI) -> None:
    """Add the page's paths to the application. They need no key: only the events do."""
    files = page_files()

    def answer(name: str) -> Response:
        kind = _KINDS[name.rpartition(".")[2]]
        return Response(files[name], headers={**_HEADERS, "content-type": kind})

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return answer("index.html")

    @app.get("/page/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in files:
            raise ApiError(404, f"GET /page/{name}: Not Found")
        return answer(name)
