"""Signals and child processes: Ctrl-C, SIGTERM and SIGHUP all end a run gracefully, with results kept and reported."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

_WORDS = {"SIGINT": "interrupted", "SIGTERM": "terminated", "SIGHUP": "hung up"}
_SAME_EVENT_S = 1.0  # torchrun forwards the Ctrl-C that its ranks have already received


class Ended(KeyboardInterrupt):
    """A signal ended the run."""

    def __init__(self, signum: int) -> None:
        self.signum = signum

    @property
    def word(self) -> str:
        """The signal in a word, such as `interrupted`."""
        return _WORDS[signal.Signals(self.signum).name]

    @property
    def exit_code(self) -> int:
        """The shell's exit code for this signal: 128 + its number."""
        return 128 + self.signum


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Raise `Ended` in the main thread at the first signal. A second one exits the process immediately.

    Signals that the parent process ignores (`nohup`) stay ignored. While Ray's C++ code waits, a handler's exception
    becomes a plain KeyboardInterrupt, which is converted to `Ended` too.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    first: tuple[int, float] | None = None  # the signal and its time

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal first
        if first is None:
            first = signum, time.monotonic()
            _let_go_of_closed_terminal()
            raise Ended(signum)
        if time.monotonic() - first[1] > _SAME_EVENT_S:
            os._exit(128 + signum)

    found = [signal.Signals[name] for name in _WORDS if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in found}
    handled = [number for number in found if before[number] is not signal.SIG_IGN]
    for number in handled:
        signal.signal(number, handle)
    try:
        yield
    except KeyboardInterrupt as error:
        if isinstance(error, Ended):
            raise
        raise Ended(first[0] if first else signal.SIGINT) from error
    finally:
        for number in handled:
            signal.signal(number, before[number])


@contextmanager
def counted_interrupts() -> Iterator[Callable[[], int]]:
    """Count Ctrl-C instead of ending the run; yield a function that returns the count."""
    count = 0

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: count
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def plain_interrupts() -> Iterator[None]:
    """Make Ctrl-C raise a KeyboardInterrupt each time."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _let_go_of_closed_terminal() -> None:
    """Redirect closed standard streams to /dev/null, so that printing does not fail."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def end_process(process: subprocess.Popen[Any], grace_s: float = 0.0) -> None:
    """Kill a process unless it exits within `grace_s` seconds, and reap it."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)
    process.kill()
    process.wait()


def how_ended(code: int) -> str:
    """Describe a `subprocess` return code; negative: the number of a signal."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal has no name
        name = f"signal {-code}"
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
