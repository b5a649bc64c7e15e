"""What `engine=NAME` stands for: the defaults of a version of an engine, as keys of a simulation."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from .build import load_group, value_text


def engine_defaults(name: str, hardware: str | None, known: Collection[str]) -> dict[str, str]:
    """Return the defaults of an engine on some hardware, as overrides of keys that are `known`.

    Raises:
        ConfigError: there is no such engine.
    """
    found: dict[str, Any] = load_group("engine", name)
    of_hardware: Mapping[str, Any] = found.pop("of_hardware", {})
    found |= of_hardware.get(hardware or "", {})
    return {key: value_text(value) for key, value in found.items() if key in known}
