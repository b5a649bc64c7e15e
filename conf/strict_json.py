"""Parses JSON of a user's file. A key that stands twice in an object is an error; `json` itself takes the last one."""

from __future__ import annotations

import json
from typing import Any

from .errors import ConfigError


def loads(text: str) -> Any:
    """Parse JSON.

    Raises:
        ConfigError: a key stands twice in one object.
        ValueError, RecursionError: as `json.loads`.
    """
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ConfigError(f"key {twice!r} is given twice")
    return found


DECODER = json.JSONDecoder(object_pairs_hook=_object)  # for texts that hold more than one value
