"""Processes that a server forks which has imported all that they need: a start costs no import.

A process of its own for the tests in every other respect: exit codes, signals, standard streams, working directory.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing import forkserver
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any

from tests.support.tiers import HANGS_S

# After torch: what `gapless` imports as it goes.
PRELOADED = (
    *("torch", "gapless.parallel.layers", "gapless.models.stage", "gapless.runtime.pipeline.rank", "gapless.runtime"),
    *("hydra.compose", "gapless.launch.cli", "gapless.launch.job", "gapless.launch.generate", "gapless.launch.serve"),
    *("gapless.launch.simulate", "gapless.launch.report", "gapless.launch.help", "tests.support.forked"),
)
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(list(PRELOADED))


def begin() -> None:
    """Start the server, which imports for some seconds, and do not wait for it."""
    forkserver.ensure_running()


@cache
def await_server() -> None:
    """Wait until the server has imported all."""
    Process(int).wait()


class Process:
    """A function in a process of its own, with the part of `subprocess.Popen` that tests use.

    Args:
        target: what the process calls; what it returns is the exit code.
        arguments: its arguments. They are pickled.
        stdin, stdout, stderr: files, or numbers of files; by default those of this process, and nothing to read.
        cwd: the working directory.
        env: the whole environment. Variables that are read at an import, such as OMP_NUM_THREADS, come too late.
    """

    def __init__(
        self,
        target: Callable[..., int | None],
        *arguments: Any,
        stdin: IO[Any] | int | None = None,
        stdout: IO[Any] | int = 1,
        stderr: IO[Any] | int = 2,
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        with open(os.devnull, "rb") as nothing:
            streams = [DupFd(s if isinstance(s, int) else s.fileno()) for s in (stdin or nothing, stdout, stderr)]
            self._process = _CONTEXT.Process(
                target=_run, args=(target, arguments, streams, os.fspath(cwd or Path.cwd()), dict(env or os.environ))
            )
            self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(["gapless"], timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended, and nobody has noticed yet
            if self.poll() is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(
    target: Callable[..., int | None],
    arguments: tuple[Any, ...],
    streams: Sequence[Any],
    cwd: str,
    environment: Mapping[str, str],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for number, stream in enumerate(streams):
        os.dup2(stream.detach(), number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    try:
        code = target(*arguments)
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
    sys.exit(code or 0)


def execute(source: str, arguments: Sequence[str]) -> None:
    """Run Python source, as `python -c` does."""
    sys.argv = ["-c", *arguments]
    exec(compile(source, "<source>", "exec"), {"__name__": "__main__"})


def main(arguments: Sequence[str]) -> int:
    """Run the program `gapless`."""
    from gapless.launch import cli

    sys.argv = ["gapless", *arguments]
    return cli.main()


def gapless(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `gapless` to its end; `options` are those of `finish`."""
    return finish(main, arguments, **options)


def finish(
    target: Callable[..., int | None],
    *arguments: Any,
    cwd: Path | None = None,
    stdin: str = "",
    env: Mapping[str, str] | None = None,
    timeout: float = HANGS_S,
) -> subprocess.CompletedProcess[str]:
    """Run a function in a process to its end, as `subprocess.run` does with a program."""
    with (
        tempfile.TemporaryFile("w+") as given,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        given.write(stdin)
        given.seek(0)
        process = Process(target, *arguments, stdin=given, stdout=out, stderr=err, cwd=cwd, env=env)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(list(arguments), code, out.read(), err.read())
