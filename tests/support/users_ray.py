"""A Ray that a user has started with `ray start`, on ports and in a folder of its own."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from tests.support.processes import program_of


class UsersRay:
    """It starts with `start`, as often as a test likes, at one `address`. Leaving the context ends and removes all."""

    def __init__(self, num_cpus: int, env: Mapping[str, str]) -> None:
        self._folder = tempfile.mkdtemp(prefix="ray-")
        self._port = random.randrange(20000, 30000)  # outside the range of ports that the system gives away
        self._env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", **env}
        self._num_cpus = num_cpus
        self.address = f"127.0.0.1:{self._port}"

    def start(self) -> None:
        """End what is left, and run `ray start`."""
        self.end()
        options = f"--port={self._port} --temp-dir={self._folder} --num-cpus={self._num_cpus} --include-dashboard=false"
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", *options.split()]
        done = subprocess.run(command, capture_output=True, text=True, env=self._env)
        assert done.returncode == 0, done.stdout + done.stderr

    def pids(self) -> list[int]:
        """Return its processes: those whose command lines have its folder."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if self._folder in path.read_text():
                    found.append(int(path.parent.name))
        return found

    def lose(self, program: str) -> None:
        """Kill the one of its processes that runs this program."""
        (victim,) = [pid for pid in self.pids() if program_of(pid) == program]
        os.kill(victim, signal.SIGKILL)

    def end(self) -> None:
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def __enter__(self) -> UsersRay:
        self.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.end()
        shutil.rmtree(self._folder)
