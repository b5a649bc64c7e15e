"""Defaults of other serving engines as config keys: `engine=NAME`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from .build import load_group, value_text


def engine_defaults(name: str, hardware: str | None, known: Collection[str]) -> dict[str, str]:
    """Return the defaults of an engine on this hardware, as overrides; only `known` keys.

    Raises:
        ConfigError: unknown engine.
    """
    found: dict[str, Any] = load_group("engine", name)
    of_hardware: Mapping[str, Any] = found.pop("of_hardware", {})
    found |= of_hardware.get(hardware or "", {})
    return {key: value_text(value) for key, value in found.items() if key in known}
