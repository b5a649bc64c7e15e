"""Ctrl-C, SIGTERM and SIGHUP end a run in the same way: what was done is kept and reported, the ranks end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_WORDS = {"SIGINT": "interrupted", "SIGTERM": "terminated", "SIGHUP": "hung up"}
_SAME_EVENT_S = 1.0  # torchrun passes on the Ctrl-C that its ranks have already had from the terminal


class Ended(KeyboardInterrupt):
    """A signal ended the run."""

    def __init__(self, signum: int) -> None:
        self.signum = signum

    @property
    def word(self) -> str:
        """The signal in a word for people: `interrupted`, say."""
        return _WORDS[signal.Signals(self.signum).name]

    @property
    def exit_code(self) -> int:
        """The exit code that a shell gives a command that this signal ended: 128 + its number."""
        return 128 + self.signum


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Raise `Ended` in the main thread at the first signal. A second one ends the process at once.

    A signal that whoever started us had ignored (`nohup`) stays ignored. Where Ray's C++ code waits, what a handler
    raises comes out as a plain KeyboardInterrupt; it leaves this context as the `Ended` of the signal too.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    first: tuple[int, float] | None = None  # the signal and when it came

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
    """Count Ctrl-C instead of ending the run; yield the function that returns how often it came."""
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
    """Have Ctrl-C raise a KeyboardInterrupt that may be caught, each time that it comes."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _let_go_of_closed_terminal() -> None:
    """Make what is printed from now on vanish where nobody can read it, instead of failing."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def how_ended(code: int) -> str:
    """Say how a process ended, by its return code as `subprocess` has it: below 0, the number of a signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal has no name
        name = f"signal {-code}"
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
