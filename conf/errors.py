"""The error of a user's input: one line that names the key or file, and what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A key or value that the user can mend; the command line prints it in one line."""


def nearest(word: str, valid: Iterable[str]) -> str:
    """`; did you mean 'chunk'?` where a valid word begins so or is near, else the list of valid words."""
    words = sorted(valid)
    begins = [each for each in words if word and each.startswith(word)]
    near = begins if len(begins) == 1 else difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f"; did you mean '{near[0]}'?" if near else f"; valid: {', '.join(words)}"


def check(key: str, value: object, holds: bool, right: str) -> None:
    """Raise the `ConfigError` of a key whose value is out of its range, unless it `holds`."""
    if not holds:
        raise ConfigError(f"{key}={value!r}: must be {right}")
