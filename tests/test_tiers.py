"""The budget of time of the tiers, which names tests and fails none."""

from __future__ import annotations

from typing import Literal

import pytest

from tests.support import tiers


def report(name: str, calibrations: float, *marks: str, when: Literal["setup", "call"] = "call") -> pytest.TestReport:
    keywords = dict.fromkeys(marks, 1)
    return pytest.TestReport(name, ("f", 1, name), keywords, "passed", None, when, duration=0.5 * calibrations)


@pytest.mark.parametrize("is_whole", [False, True])
def test_quick_tests_over_their_share_are_named(is_whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tiers.EVERYTHING, str(int(is_whole)))
    reports = [
        report("quick", 99),
        report("over", 101),
        report("property", 499, "hypothesis"),
        report("far_over", 501, "hypothesis"),
        report("slow", 900, "slow"),
        report("over", 900, when="setup"),
    ]
    *lines, total = tiers.over_budget(reports, 0.5)
    expected = ["far_over", "over"] if is_whole else ["far_over", "property", "over"]
    assert [line.partition(":")[0] for line in lines] == expected
    assert total == "5 tests took 2,100 calibrations of 0.500 s"


def test_a_machine_is_calibrated() -> None:
    assert 0 < tiers.calibration() < float("inf")
