"""A process that runs tasks within time and memory limits, so that they cannot hang, crash or exhaust the parent."""

from __future__ import annotations

import pickle
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

_SLACK_S = 30.0  # for busy machines: the limit itself counts processor time
_MAIN = "from gapless.models.limited_process import main; main()"


class LimitError(ValueError):
    """A task exceeded its time or memory limit, or crashed its process."""


class LimitedProcess:
    """Runs one task at a time. Thread-safe. The process starts on the first task and restarts after a task killed it.

    Args:
        memory: limit of the process's data in bytes; None: no limit.
    """

    def __init__(self, memory: int | None = None) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def run(self, task: bytes | Callable[[], Any], seconds: float) -> Any:
        """Return what `task` returns: a function at the top level of a module, a `partial` of one, or its pickle.

        Args:
            task: what to run.
            seconds: limit of processor time.

        Raises:
            LimitError: it exceeds the time or memory limit, or crashes.
            ValueError, RecursionError: `task` raised it, or is nested too deeply to be pickled.
        """
        request = task if isinstance(task, bytes) else pickle.dumps(task, pickle.HIGHEST_PROTOCOL)
        with self._lock:
            connection, answer = self._start(), None
            try:
                connection.send((request, seconds))
                if connection.poll(seconds + _SLACK_S):
                    answer = connection.recv()
            except (EOFError, OSError):
                pass
            finally:
                if answer is None:  # also if a signal interrupts the wait
                    self._end()
        if answer is None:
            raise LimitError(f"{seconds:g} s of processor time" + self._memory_words)
        error, found = answer
        if error is not None:
            raise error
        return found

    def close(self) -> None:
        """Kill the process and the running task."""
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            self._end()

    @property
    def _memory_words(self) -> str:
        return "" if self._memory is None else f" and {self._memory >> 20} MiB"

    def _start(self) -> Connection:
        if self._connection is None or self._process is None or self._process.poll() is not None:
            self._end()
            self._connection, theirs = Pipe()
            command = [sys.executable, "-P", "-c", _MAIN, str(theirs.fileno()), str(self._memory or 0)]
            with theirs:
                self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        return self._connection

    def _end(self) -> None:
        if self._process is not None and self._connection is not None:
            self._connection.close()
            self._process.kill()
            self._process.wait()
            self._process = self._connection = None


def main() -> None:
    """Entry point of the process: run each task and send its error, or None, and its result."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection, memory = Connection(int(sys.argv[1])), int(sys.argv[2])
    if memory:
        resource.setrlimit(resource.RLIMIT_DATA, (memory, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    with suppress(EOFError, OSError, MemoryError):  # the parent exited, or a task exceeded its memory
        while True:
            request, seconds = connection.recv()
            task = pickle.loads(request)
            signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal kills the process
            answer: tuple[Exception | None, Any]
            try:
                answer = None, task()
            except (ValueError, RecursionError) as error:
                answer = error, None
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send(answer)
