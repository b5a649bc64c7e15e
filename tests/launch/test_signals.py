"""A second signal ends a command that is still ending; ignored signals stay ignored."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from gapless.launch.signals import Ended, ended_by_signals, how_ended
from tests.support.tiers import HANGS_S

SLOW_TO_END = """
import time
from gapless.launch.signals import ended_by_signals
with ended_by_signals():
    try:
        print(flush=True)
        time.sleep(60)
    finally:
        print(flush=True)
        time.sleep(60)
"""


def test_a_second_signal_ends_at_once() -> None:
    process = subprocess.Popen([sys.executable, "-c", SLOW_TO_END], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)  # the same event, passed on by another process
    time.sleep(1.2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=HANGS_S) == 130


def test_a_signal_that_was_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ended_by_signals():
            signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_signal_is_known_where_a_library_raises_a_plain_interrupt_in_its_place() -> None:
    """Ray does so where its C++ code waits; a SIGTERM then ended a run as `interrupted` with code 130."""

    def wait() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None

    with pytest.raises(Ended) as caught, ended_by_signals():
        wait()
    assert (caught.value.word, caught.value.exit_code) == ("terminated", 143)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "exited with code 0"),
        (7, "exited with code 7"),
        (-signal.SIGTERM, "was killed by SIGTERM"),
        (-signal.SIGKILL, "was killed by SIGKILL (out of memory?)"),
        (-40, "was killed by signal 40"),
    ],
)
def test_how_a_process_ended_names_its_signal(code: int, text: str) -> None:
    assert how_ended(code) == text
