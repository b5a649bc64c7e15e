"""Errors of the user's input: one line that names the key or file, and what would be right."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any


class ConfigError(ValueError):
    """A wrong key, value or file that the user can correct; the command line prints it in one line."""


def did_you_mean(word: str, valid: Sequence[str], cutoff: float = 0.6) -> str:
    """Write `; did you mean 'chunk'?` with the nearest valid word that is at least as like as `cutoff`, or nothing."""
    near = difflib.get_close_matches(word, valid, n=1, cutoff=cutoff)
    return f"; did you mean '{near[0]}'?" if near else ""


def nearest(word: str, valid: Iterable[str]) -> str:
    """Write `; did you mean 'chunk'?` where one valid word begins like this or is near, else list the valid words."""
    words = sorted(valid)
    begins = [each for each in words if word and each.startswith(word)]
    hint = did_you_mean(word, begins, 0.0) if len(begins) == 1 else did_you_mean(word, words, 0.5)
    return hint or f"; valid: {', '.join(words)}"


def reason(error: Exception) -> str:
    """Write why a file cannot be used or a server not be reached, as `permission denied`; without numbers of errors."""
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno).lower()
    return re.sub(r"\[Errno -?\d+\] ", "", str(error)) or type(error).__name__


def check(key: str, value: object, holds: bool, right: str) -> None:
    """Raise a `ConfigError` that says what is `right` for the key, unless the condition `holds`."""
    if not holds:
        raise ConfigError(f"{key}={value!r}: must be {right}")


def check_each(prefix: str, config: Any, holds: Callable[[Any], bool], right: str, *names: str) -> None:
    """Check several keys of a config by one rule; those whose default is null may be null.

    Args:
        prefix: of the keys: `scheduler.`.
        config: a dataclass that has them as fields.
        holds: the rule, of a value.
        right: says it.
        names: of the fields.

    Raises:
        ConfigError: the rule does not hold for one.
    """
    nullable = {field.name for field in dataclasses.fields(config) if field.default is None}
    for name in names:
        value = getattr(config, name)
        is_null = value is None and name in nullable
        check(prefix + name, value, is_null or holds(value), f"null or {right}" if name in nullable else right)
