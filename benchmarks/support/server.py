"""Starts servers as separate processes and queries them over HTTP."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .harness import words

_START_S = 300
_END_S = 90
_ANSWER_S = 30


@dataclass(frozen=True)
class Server:
    """A server that accepts requests."""

    host: str
    port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def get(self, path: str) -> str:
        text: bytes = urllib.request.urlopen(self.url + path, timeout=_ANSWER_S).read()
        return text.decode()

    def metrics(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Return the samples of one of gapless's metrics, each with its labels."""
        found = re.findall(rf"^gapless:{name}(?:\{{(.*)\}})? (\S+)$", self.get("/metrics"), re.MULTILINE)
        return [(dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value)) for labels, value in found]

    def gauge(self, name: str) -> float:
        """Return the sum of one of gapless's gauges over the replicas."""
        return sum(value for _, value in self.metrics(name))

    def left(self) -> int:
        """Return the number of running and waiting requests."""
        return round(self.gauge("num_requests_running") + self.gauge("num_requests_waiting"))


@contextmanager
def gapless_server(overrides: Sequence[str]) -> Iterator[Server]:
    """Start `gapless serve` on a free port, and yield once it accepts requests.

    Raises:
        SystemExit: it did not start.
    """
    command = [sys.executable, "-m", "gapless.launch.cli", "serve", *words("model=shipped", "serve.port=0", *overrides)]
    with logged(command) as (process, log):
        found = await_line(process, log, r"takes requests at http://(\S+):(\d+)/")
        yield Server(found[1], int(found[2]), process)


@contextmanager
def logged(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Start a process in an empty folder; yield it and its log file. Terminate it at the end.

    Its output goes to a file, because a process blocks on a pipe that nobody reads.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=file, cwd=folder, env=os.environ | dict(environment or {})
            )
        try:
            yield process, log
        finally:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def await_line(process: subprocess.Popen[bytes], log: Path, pattern: str) -> re.Match[str]:
    """Wait until a process has printed a match of `pattern`.

    Raises:
        SystemExit: it ended first, or 5 minutes have passed.
    """
    deadline = time.monotonic() + _START_S
    while not (found := re.search(pattern, text := log.read_text(errors="replace"))):
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the server did not start:\n{text[-3000:]}")
        time.sleep(0.1)
    return found
