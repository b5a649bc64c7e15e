"""Recorded run folders under unguessable URLs, because a browser sends no API key."""

from __future__ import annotations

import secrets
from pathlib import Path

_PAGE = "report.html"


class Recordings:
    """The folders that this server has recorded, available until it stops."""

    def __init__(self) -> None:
        self._folders: dict[str, Path] = {}

    def add(self, folder: Path) -> str:
        """Return the URL of a folder's page, relative to the server's, as a proxy may add a path prefix."""
        token = secrets.token_urlsafe(16)
        self._folders[token] = folder
        return f"recordings/{token}/{_PAGE}"

    def find(self, token: str, name: str) -> Path | None:
        """Return the file of a recording; None if there is none."""
        folder = self._folders.get(token)
        files = folder.iterdir() if folder is not None and folder.is_dir() else ()
        return next((each for each in files if each.name == name and each.is_file()), None)
