"""The folder in the user's cache for what is compiled once."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """Return the folder, which need not exist.

    Raises:
        RuntimeError: the user's home is not known.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gapless"
