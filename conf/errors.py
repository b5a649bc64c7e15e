"""Errors in user input: one line that names the key or file and says what is expected."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Sequence


class ConfigError(ValueError):
    """A wrong key, value or file that the user can correct; the command line prints it in one line."""


def did_you_mean(word: str, valid: Sequence[str], cutoff: float = 0.6) -> str:
    """Return `; did you mean 'chunk'?` for the closest valid word with a similarity of at least `cutoff`, or ""."""
    near = difflib.get_close_matches(word, valid, n=1, cutoff=cutoff)
    return f"; did you mean '{near[0]}'?" if near else ""


def nearest(word: str, valid: Iterable[str]) -> str:
    """Return `; did you mean 'chunk'?` if one valid word starts with `word` or is close to it, else all valid words."""
    words = sorted(valid)
    begins = [each for each in words if word and each.startswith(word)]
    hint = did_you_mean(word, begins, 0.0) if len(begins) == 1 else did_you_mean(word, words, 0.5)
    return hint or f"; valid: {', '.join(words)}"


def reason(error: Exception) -> str:
    """Return the reason of an I/O error, as `permission denied`, without errno."""
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno).lower()
    return re.sub(r"\[Errno -?\d+\] ", "", str(error)) or type(error).__name__


def check(key: str, value: object, holds: bool, right: str) -> None:
    """Raise a `ConfigError` that states the `right` value of the key, unless the condition `holds`."""
    if not holds:
        raise ConfigError(f"{key}={value!r}: must be {right}")
