"""Parses JSON from user files; duplicate keys are errors, whereas `json` keeps the last one."""

from __future__ import annotations

import json
from typing import Any

from .errors import ConfigError


def loads(text: str) -> Any:
    """Parse JSON.

    Raises:
        ConfigError: an object has a duplicate key.
        ValueError, RecursionError: as `json.loads`.
    """
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ConfigError(f"duplicate key {twice!r}")
    return found


DECODER = json.JSONDecoder(object_pairs_hook=_object)  # for texts with more than one value
