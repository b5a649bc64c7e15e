"""The two tiers of tests: `make test`, which must be quick, and `make test-all`, which leaves nothing out."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

EVERYTHING = "GAPLESS_TEST_ALL"  # the environment variable that says so to the processes of a test run


def is_whole() -> bool:
    """Whether this run leaves nothing out."""
    return os.environ.get(EVERYTHING) == "1"


def examples(count: int) -> int:
    """Return how many examples hypothesis tries: `count` in the second tier, a fifth (five at least) in the first."""
    return count if is_whole() else min(count, max(5, count // 5))


def first_quick(values: Iterable[Any]) -> list[Any]:
    """Return values of a parameter, or tuples of several ones': the first tier tries one of them, the second all."""
    first, *others = values
    parts = (other if isinstance(other, tuple) else (other,) for other in others)
    return [first, *(pytest.param(*part, marks=pytest.mark.slow) for part in parts)]


def stretched(seconds: float) -> float:
    """Return how long `seconds` may become while more processes want to run than there are cores."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def left_out(slow: int, skipped: Iterable[str]) -> list[str]:
    """Say what a run left out, and what would run it."""
    lines = []
    if not is_whole():
        lines.append(f"{slow} tests marked slow, and four of five examples of property tests: make test-all")
    return lines + [f"{count} skipped: {reason}" for reason, count in sorted(Counter(skipped).items())]
