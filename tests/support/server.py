"""A server that a test talks to over HTTP."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2

from tests.support.forked import Process, main
from tests.support.processes import descendants_of
from tests.support.tiers import HANGS_S

_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
# An environment that leads all that goes by way of a proxy nowhere.
DEAD_PROXIES = dict.fromkeys((*_PROXIES, *map(str.upper, _PROXIES)), "http://127.0.0.1:9") | {"no_proxy": ""}


class Server:
    """`gapless serve` in a process of its own."""

    def __init__(
        self, folder: Path, *overrides: str, program: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> None:
        """Start it: forked, or as a Python module that is the first word of `program`, with the words after it."""
        self._log = (folder / "log").open("w+")
        replicas = [word.partition("=")[2] for word in overrides if word.startswith("serve.replicas=")]
        self._num_engines = int(replicas[0]) if replicas else 1
        words = ["serve", "model=shipped", "serve.port=0", *overrides]
        self.process: Process | subprocess.Popen[bytes]
        if program:
            command = [sys.executable, "-m", *program, *words]
            self.process = subprocess.Popen(command, stderr=self._log, cwd=folder)
        else:
            self.process = Process(main, words, stderr=self._log, cwd=folder, env={**os.environ, **(env or {})})
        self.url = self._await(r"listens at (https?://\S+);")

    def _await(self, pattern: str) -> str:
        deadline = time.monotonic() + HANGS_S
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

    @property
    def engines(self) -> list[int]:
        """The processes of the engines, in the order in which they started."""
        children = descendants_of(self.process.pid)
        spawned = sorted(pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes())
        return spawned[: self._num_engines]

    def until_ready(self) -> None:
        self.until(lambda: httpx2.get(f"{self.url}/health").status_code == 200)

    def until(self, is_so: Callable[[], object]) -> None:
        """Wait until something is so."""
        deadline = time.monotonic() + HANGS_S
        while not is_so():
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(HANGS_S)


@contextmanager
def serving(
    folder: Path, *overrides: str, program: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> Iterator[Server]:
    server = Server(folder, *overrides, program=program, env=env)
    try:
        server.until_ready()
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()
