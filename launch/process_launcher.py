"""Runs ranks as children of this process, on this machine's CPUs: nothing else has to start, as Ray does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict

from ..conf.clusters import ClusterConfig
from ..conf.errors import ConfigError
from ..conf.schema import HardwareConfig, ParallelConfig
from ..parallel.control import Endpoint
from ..runtime.pipeline.launcher import Launcher
from .signals import how_ended
from .stderr_log import messages_on_stderr

_END_S = 5.0  # for a rank to end after the coordinator has said so


class ProcessLauncher(Launcher):
    """Starts each rank in a session of its own: the coordinator ends them, and they end when it has died."""

    can_replace = True

    def __init__(self) -> None:
        self._ranks: dict[int, subprocess.Popen[str]] = {}
        self._timeout_s = 0.0

    def check(self, parallel: ParallelConfig, hardware: HardwareConfig) -> None:
        """Raise `ConfigError` for what needs Ray or torchrun."""
        if hardware.device != "cpu":
            raise ConfigError(
                f"parallel.launcher=process: starts ranks on CPUs; choose ray for hardware={hardware.name}"
            )
        if parallel.spares:
            raise ConfigError(f"parallel.spares={parallel.spares}: parallel.launcher=process has none; choose ray")

    def start(
        self, endpoint: Endpoint, parallel: ParallelConfig, hardware: HardwareConfig, cluster: ClusterConfig
    ) -> None:
        """See `Launcher.start`."""
        self._timeout_s = parallel.start_timeout_s
        for rank in range(parallel.world_size):
            self._start(rank, endpoint)

    def _start(self, rank: int, endpoint: Endpoint) -> None:
        # -P: a folder named torch in the working directory is not what ranks import.
        command = [sys.executable, "-P", "-m", "gapless.launch.process_launcher"]
        env = {"TORCHDYNAMO_DISABLE": "1"} | os.environ
        process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, start_new_session=True, text=True)
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:  # it holds the secret, which command lines show to everyone
            json.dump({"endpoint": asdict(endpoint), "rank": rank, "timeout_s": self._timeout_s}, process.stdin)
        self._ranks[rank] = process

    def replace(self, ranks: Collection[int], endpoint: Endpoint) -> None:
        """See `Launcher.replace`."""
        for rank in ranks:
            self._end(rank, 0.0)
            self._start(rank, endpoint)

    def poll(self) -> dict[int, str]:
        """See `Launcher.poll`."""
        codes = {rank: process.poll() for rank, process in self._ranks.items()}
        return {rank: f"its process {how_ended(code)}" for rank, code in codes.items() if code is not None}

    def stop(self) -> None:
        """See `Launcher.stop`."""
        for rank in list(self._ranks):
            self._end(rank, _END_S)
        self._ranks.clear()

    def _end(self, rank: int, timeout: float) -> None:
        process = self._ranks[rank]
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout)
        process.kill()
        process.wait()


def main() -> int:
    """Be a rank, as standard input says of what. Return the exit code."""
    from ..runtime.pipeline.rank import run_rank

    address = json.load(sys.stdin)
    try:
        with messages_on_stderr():
            run_rank(Endpoint(**address["endpoint"]), address["rank"], "cpu", address["timeout_s"])
    except ImportError:
        raise
    except Exception:  # the coordinator has been told of it
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
