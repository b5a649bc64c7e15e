"""Ranges of numeric keys, declared with the type of a field: `Annotated[int | None, Within(1, 64)]`."""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from .errors import check


@dataclass(frozen=True, slots=True)
class Within:
    """The values from `least` to `most`, without `least` itself if the range is `open`."""

    least: float
    most: float = math.inf
    open: bool = False

    def __contains__(self, value: float) -> bool:
        return (self.least < value if self.open else self.least <= value) and value <= self.most

    def __str__(self) -> str:
        least, most = (f"{bound:.10g}" for bound in (self.least, self.most))
        if math.isinf(self.most):
            return f"above {least}" if self.open else f"{least} or more"
        return f"above {least}, at most {most}" if self.open else f"{least} to {most}"


AT_LEAST_ONE, NOT_NEGATIVE, SHARE = Within(1), Within(0), Within(0, 1)
POSITIVE = Within(0, open=True)


@cache
def resolved_types(cls: type) -> Mapping[str, Any]:
    """Return the resolved types of a dataclass's fields, with their ranges."""
    return typing.get_type_hints(cls, include_extras=True)


def plain_type(hint: Any) -> Any:
    """Return a field's type without its range."""
    return hint.__origin__ if typing.get_origin(hint) is typing.Annotated else hint


def check_ranges(config: Any, prefix: str = "") -> None:
    """Check the numbers of a dataclass. `prefix` begins the dotted keys of its fields: `scheduler.`.

    Raises:
        ConfigError: a number is out of its range.
    """
    cls: type = type(config)
    for name, (within, right) in _ranges(cls).items():
        value = getattr(config, name)
        if isinstance(value, (int, float)) and value not in within:
            check(f"{prefix}{name}", value, False, right)


@cache
def _ranges(cls: type) -> dict[str, tuple[Within, str]]:
    """Return each field's range, and all values that the field accepts in words."""
    found: dict[str, tuple[Within, str]] = {}
    for name, hint in resolved_types(cls).items():
        for within in getattr(hint, "__metadata__", ()):
            options = typing.get_args(hint.__origin__)
            words = ["null"] if type(None) in options else []
            words += [each for option in options if typing.get_origin(option) is Literal for each in option.__args__]
            found[name] = within, " or ".join(filter(None, (", ".join(words), str(within))))
    return found
