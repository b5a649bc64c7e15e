"""Errors of the user's input: one line that names the key or file, and what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A wrong key, value or file that the user can correct; the command line prints it in one line."""


def nearest(word: str, valid: Iterable[str]) -> str:
    """Write `; did you mean 'chunk'?` where one valid word begins like this or is near, else list the valid words."""
    words = sorted(valid)
    begins = [each for each in words if word and each.startswith(word)]
    near = begins if len(begins) == 1 else difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f"; did you mean '{near[0]}'?" if near else f"; valid: {', '.join(words)}"


def check(key: str, value: object, holds: bool, right: str) -> None:
    """Raise a `ConfigError` that says what is `right` for the key, unless the condition `holds`."""
    if not holds:
        raise ConfigError(f"{key}={value!r}: must be {right}")
