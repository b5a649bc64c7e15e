"""Recorded run folders, each at a URL that only those know who were told it: a browser sends no API key."""

from __future__ import annotations

import mimetypes
import secrets
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import FileResponse, Response

from .errors import ApiError

_PATH = "recordings"
_PAGE = "report.html"
_HEADERS = {
    # Its scripts draw it; they get nothing of this server's origin.
    "content-security-policy": "sandbox allow-scripts allow-popups allow-downloads",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


class Recordings:
    """The folders that this server has recorded, until it ends."""

    def __init__(self) -> None:
        self._folders: dict[str, Path] = {}

    def add(self, folder: Path) -> str:
        """Return the URL of a folder's page, relative to the server's, which a proxy may have put below a path."""
        token = secrets.token_urlsafe(16)
        self._folders[token] = folder
        return f"{_PATH}/{token}/{_PAGE}"

    def add_paths(self, app: FastAPI) -> None:
        """Add the path of each file to the application."""

        @app.get(f"/{_PATH}/" + "{token}/{name}", include_in_schema=False)
        async def file(token: str, name: str) -> Response:
            folder = self._folders.get(token)
            names = {each.name for each in folder.iterdir() if each.is_file()} if folder and folder.is_dir() else ()
            if folder is None or name not in names:
                raise ApiError(404, "there is no such file of a recording")
            kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
            return FileResponse(folder / name, headers={**_HEADERS, "content-type": kind})
