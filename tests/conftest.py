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

from tests.support import tiers

# On a shared machine one example may take a hundred times as long as the next. Both tiers try the same examples each
# time, so that a change is what makes a test fail; `--draw` tries new ones.
settings.register_profile("first", max_examples=20, deadline=None, derandomize=True)
settings.register_profile("whole", deadline=None, derandomize=True)
settings.register_profile("drawn", deadline=None)
SLOW = pytest.StashKey[int]()
HANGS = 600  # seconds after which a test has failed, in either tier: none takes a third of it on a quiet machine
ROOMS = ("launch", "benchmarks", "models", "parallel", "kernels")  # their tests wait for processes, so they begin first


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="what is marked slow too, and all examples of property tests")
    parser.addoption("--draw", action="store_true", help="with --all: new examples of property tests")
    parser.addoption("--limit", type=float, default=5.0, help="seconds of a test that is not marked slow; 0: no limit")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.all:
        os.environ[tiers.EVERYTHING] = "1"
    whole = "drawn" if config.option.draw else "whole"
    settings.load_profile(whole if tiers.is_whole() else "first")


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
    signal.alarm(HANGS)
    try:
        return (yield)
    finally:
        signal.alarm(0)


def _fail_for_hanging(_number: int, _frame: FrameType | None) -> NoReturn:
    pytest.fail(f"hangs: no end after {HANGS} s")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Wait for the server that forks processes before a test that may need it, whose time it is not."""
    if _order(item) == 0 and (forked := sys.modules.get("tests.support.forked")):
        forked.await_server()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fail a test that takes more than the limit and is not marked slow, so that the first tier stays quick."""
    begin = time.monotonic()
    result = yield
    seconds = time.monotonic() - begin
    limit: float = 0.0 if tiers.is_whole() else item.config.option.limit
    if limit and seconds > tiers.stretched(limit):
        pytest.fail(f"took {seconds:.1f} s: make it quicker than {limit:g} s, or mark it slow", pytrace=False)
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["slow"] = session.config.stash.get(SLOW, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[SLOW] = getattr(node, "workeroutput", {}).get("slow", 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say what this tier left out and what would run it."""
    reasons = [report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", ())]
    if lines := tiers.left_out(config.stash.get(SLOW, 0), reasons):
        terminalreporter.section("left out")
        for line in lines:
            terminalreporter.write_line(line)
