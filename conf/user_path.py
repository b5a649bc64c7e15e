"""Paths from user input, and the cache folder for compiled files."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import ConfigError


def user_path(text: str | Path, key: str = "") -> Path:
    """Return the path with `~` or `~NAME` expanded.

    Raises:
        ConfigError: the home folder is unknown; the message names the key, if given.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        given = f"{key}={text}" if key else str(text)
        raise ConfigError(f"{given}: cannot expand ~ to a home folder; give the full path") from None


def user_cache() -> Path:
    """Return the cache folder, which need not exist.

    Raises:
        RuntimeError: the user's home folder is unknown.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gapless"
