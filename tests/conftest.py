"""What all tests share: the two tiers, and which tests begin."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Generator
from types import FrameType
from typing import Any, NoReturn

import pytest
from hypothesis import settings

from gapless.kernels import processor
from tests.support import tiers

# Threads of OpenMP that wait sleep, here and in what tests start. Spinning, which is libgomp's default, takes the cores
# from the threads that are waited for where three processes of pytest share two of them: up to 20 times the CPU time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# On a shared machine one example may take a hundred times as long as the next. Both tiers try the same examples each
# time, so that a change is what makes a test fail; `--draw` tries new ones.
settings.register_profile("first", max_examples=20, deadline=None, derandomize=True)
settings.register_profile("whole", deadline=None, derandomize=True)
settings.register_profile("drawn", deadline=None)
BEGIN = time.monotonic()
SLOW = pytest.StashKey[int]()
CALIBRATION = pytest.StashKey[float]()
HANGS = 2 * tiers.HANGS_S  # after which a test has failed, in either tier
ROOMS = ("launch", "benchmarks", "models", "parallel", "kernels")  # their tests wait for processes, so they begin first


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="what is marked slow too, and all examples of property tests")
    parser.addoption("--draw", action="store_true", help="with --all: new examples of property tests")
    parser.addoption("--budget", action="store_true", help="name tests that take more than their share of time")
    parser.addoption("--minutes", type=float, metavar="M", help="skip what is marked slow after so long")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.all:
        os.environ[tiers.EVERYTHING] = "1"
    whole = "drawn" if config.option.draw else "whole"
    settings.load_profile(whole if tiers.is_whole() else "first")
    if config.option.budget and not hasattr(config, "workerinput"):  # before the processes that run tests start
        config.stash[CALIBRATION] = tiers.calibration()


def pytest_report_header() -> str:
    level = processor.level()
    return f"kernels: {level.name if level else 'none for this processor'}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is slow, and begin with what waits for processes."""
    slow = [] if tiers.is_whole() else [item for item in items if item.get_closest_marker("slow")]
    config.stash[SLOW] = len(slow)
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in set(slow)]
    items.sort(key=_order)


def _order(item: pytest.Item) -> int:
    room = item.path.relative_to(item.config.rootpath / "tests").parts[0]
    return ROOMS.index(room) if room in ROOMS else len(ROOMS)


def pytest_collection_finish(session: pytest.Session) -> None:
    if forked := sys.modules.get("tests.support.forked"):  # some test starts processes
        forked.begin()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, Any, Any]:
    """Fail a test that waits for ever, where it waits, so that the others go on."""
    signal.signal(signal.SIGALRM, _fail_for_hanging)
    signal.alarm(int(HANGS))
    try:
        return (yield)
    finally:
        signal.alarm(0)


def _fail_for_hanging(_number: int, _frame: FrameType | None) -> NoReturn:
    pytest.fail(f"hangs: no end after {HANGS:.0f} s")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Wait for the server that forks processes, so that its start is not part of the test's duration.

    Skip a test marked slow where the run has taken its time, which a slow machine needs for the first tier.
    """
    minutes = item.config.option.minutes
    if minutes is not None and time.monotonic() - BEGIN > 60 * minutes and item.get_closest_marker("slow"):
        pytest.skip(f"marked slow, after {minutes:g} minutes")
    if _order(item) == 0 and (forked := sys.modules.get("tests.support.forked")):
        forked.await_server()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["slow"] = session.config.stash.get(SLOW, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[SLOW] = getattr(node, "workeroutput", {}).get("slow", 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print what this tier left out, what would run it, and which tests took more than their share of time."""
    reasons = [report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", ())]
    if lines := tiers.left_out(config.stash.get(SLOW, 0), reasons):
        terminalreporter.section("left out")
        for line in lines:
            terminalreporter.write_line(line)
    if calibration := config.stash.get(CALIBRATION, 0.0):
        reports = [one for kind in ("passed", "failed") for one in terminalreporter.stats.get(kind, ())]
        terminalreporter.section("time, which fails no test")
        for line in tiers.over_budget(reports, calibration):
            terminalreporter.write_line(line)
