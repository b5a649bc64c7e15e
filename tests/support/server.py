"""A server that a test talks to over HTTP."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2


class Server:
    """`gapless serve` in a process of its own."""

    def __init__(self, folder: Path, *overrides: str, program: Sequence[str] = ("gapless.launch.cli",)) -> None:
        self._log = (folder / "log").open("w+")
        command = [sys.executable, "-m", *program, "serve", "serve.port=0", *overrides]
        self.process = subprocess.Popen(command, stderr=self._log, cwd=folder)
        self.url = self._await(r"listens at (http://\S+);")

    def _await(self, pattern: str, seconds: float = 60.0) -> str:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := re.search(pattern, self.log):
                return found.group(1)
            assert self.process.poll() is None, self.log
            time.sleep(0.02)
        raise AssertionError(self.log)

    @property
    def log(self) -> str:
        self._log.flush()
        return Path(self._log.name).read_text()

    def until_ready(self) -> None:
        deadline = time.monotonic() + 90
        while httpx2.get(f"{self.url}/health").status_code != 200:
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


@contextmanager
def serving(folder: Path, *overrides: str) -> Iterator[Server]:
    server = Server(folder, *overrides)
    try:
        server.until_ready()
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()
