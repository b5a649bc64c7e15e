"""Paths as a user gives them, and the folder in the user's cache for what is compiled once."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import ConfigError


def user_path(text: str | Path, key: str = "") -> Path:
    """Return the path with the home that `~` or `~NAME` stands for.

    Raises:
        ConfigError: that home is not known; it names the key, if one is given.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        given = f"{key}={text}" if key else str(text)
        raise ConfigError(f"{given}: the home that ~ stands for is not known; write the path out") from None


def user_cache() -> Path:
    """Return the folder, which need not exist.

    Raises:
        RuntimeError: the user's home is not known.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gapless"
