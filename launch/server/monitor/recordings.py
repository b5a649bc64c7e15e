"""Serves recorded run folders under unguessable URLs, because browsers send no API key."""

from __future__ import annotations

import secrets
from pathlib import Path

_PAGE = "report.html"


class Recordings:
    """The recorded folders of this server, available until it stops."""

    def __init__(self) -> None:
        self._folders: dict[str, Path] = {}

    def add(self, folder: Path) -> str:
        """Return the URL of a folder's report, relative to the server's root because a proxy may add a path prefix."""
        token = secrets.token_urlsafe(16)
        self._folders[token] = folder
        return f"recordings/{token}/{_PAGE}"

    def find(self, token: str, name: str) -> Path | None:
        """Return a file of a recording; None if it does not exist."""
        folder = self._folders.get(token)
        files = folder.iterdir() if folder is not None and folder.is_dir() else ()
        return next((each for each in files if each.name == name and each.is_file()), None)
