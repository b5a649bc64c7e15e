"""Runs parts in separate processes, so that a part that hangs or breaks the device does not affect others."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from .parts import Part, Task
from .rows import Row


class Worker:
    """A process that runs parts in order.

    It is replaced after a part that fails, since a CUDA error may affect all later calls, and for a part that needs
    another process.
    """

    def __init__(self) -> None:
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        self._name = ""

    def run(self, part: Part, task: Task) -> Iterator[Row]:
        """Run a part and yield its rows as they arrive; if it fails, yield a FAIL row."""
        end = time.monotonic() + part.budget_s
        if self._name != (part.process or part.name):
            self.stop()
        connection = self._connection or self._start(part.process or part.name)
        failure = ""
        try:
            connection.send((part, task))
            while True:
                if not connection.poll(max(0.0, end - time.monotonic())):
                    failure = f"timed out after {part.budget_s:.0f} s"
                    break
                received = connection.recv()
                if isinstance(received, Row):
                    yield received
                    continue
                failure = received
                break
        except (EOFError, ConnectionError):
            assert self._process is not None
            self._process.join(timeout=5.0)
            failure = f"its process died (exit code {self._process.exitcode})"
        if failure:
            self.stop()
            yield Row(part=part.name, quantity=part.name, status="FAIL", note=failure)

    def stop(self) -> None:
        """Kill the process and its children."""
        if self._process is None or self._connection is None:
            return
        self._connection.close()
        assert self._process.pid is not None
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:  # not a group leader yet
            self._process.kill()
        self._process.join()
        self._process, self._connection, self._name = None, None, ""

    def _start(self, name: str) -> Connection:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,))
        process.start()
        theirs.close()
        self._process, self._connection, self._name = process, ours, name
        return ours


def _serve(connection: Connection) -> None:
    """Run parts until the connection closes. Send a part's rows, then its error, or "" without one."""
    os.setsid()  # the parent kills the whole group; Ctrl-C reaches only the parent
    os.dup2(2, 1)  # standard output is reserved for the table
    while True:
        try:
            part, task = connection.recv()
        except EOFError:
            return
        try:
            for row in part.load()(task):
                connection.send(row)
        except Exception as error:  # any error becomes a row of the table
            text = (f"{type(error).__name__}: {error}".splitlines() or [""])[0]
            connection.send(text[:160])
            sys.exit(1)
        connection.send("")
