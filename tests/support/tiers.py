"""The two tiers of tests: `make test`, which must be quick, and `make test-all`, which leaves nothing out."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

HANGS_S = 300.0  # seconds after which what a test waits for does not come, however slow and busy the machine
SHARE = 100  # calibrations that a test not marked slow may take: 8 s on two cores of Zen 3, where one takes 0.08 s
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


def left_out(slow: int, skipped: Iterable[str]) -> list[str]:
    """Say what a run left out, and what would run it."""
    lines = []
    if not is_whole():
        lines.append(f"{slow} tests marked slow, and four of five examples of property tests: make test-all")
    return lines + [f"{count} skipped: {reason}" for reason, count in sorted(Counter(skipped).items())]


def calibration() -> float:
    """Return how many seconds of a core a fixed computation takes here, the least of three times."""
    return min(_computation() for _ in range(3))


def _computation() -> float:
    begin = time.process_time()
    counts: dict[int, int] = {}
    for number in range(400_000):
        rest = number * number % 1009
        counts[rest] = counts.get(rest, 0) + 1
    return time.process_time() - begin


def over_budget(reports: Iterable[pytest.TestReport], calibration: float) -> list[str]:
    """Return a line for each quick test that took more than its share, the longest first, and one for all tests.

    Property tests try five times as many examples in the second tier, for which they have five times the share.
    """
    calls = [report for report in reports if report.when == "call"]
    lines = []
    for report in sorted(calls, key=lambda report: -report.duration):
        share = SHARE * (5 if is_whole() and "hypothesis" in report.keywords else 1)
        ratio = report.duration / calibration
        if ratio > share and "slow" not in report.keywords:
            lines.append(f"{report.nodeid}: {ratio:.0f} calibrations ({share} allowed): quicken it or mark it slow")
    total = sum(report.duration for report in calls) / calibration
    return [*lines, f"{len(calls)} tests took {total:,.0f} calibrations of {calibration:.3f} s"]
