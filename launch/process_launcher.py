"""Runs ranks as child processes on this machine's CPUs, without Ray."""

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
from ..runtime.pipeline import waits
from ..runtime.pipeline.launcher import Launcher
from .signals import end_process, how_ended
from .stderr_log import messages_on_stderr


class ProcessLauncher(Launcher):
    """Starts each rank in its own session. The coordinator stops the ranks; they exit if it dies."""

    can_replace = True

    def __init__(self) -> None:
        self._ranks: dict[int, subprocess.Popen[str]] = {}
        self._timeout_s = 0.0

    def check(self, parallel: ParallelConfig, hardware: HardwareConfig) -> None:
        """Raise `ConfigError` for settings that need Ray or torchrun."""
        if hardware.device != "cpu":
            raise ConfigError(f"parallel.launcher=process: supports CPUs only; use ray for hardware={hardware.name}")
        if parallel.spares:
            raise ConfigError(f"parallel.spares={parallel.spares}: not supported by parallel.launcher=process; use ray")

    def start(
        self, endpoint: Endpoint, parallel: ParallelConfig, hardware: HardwareConfig, cluster: ClusterConfig
    ) -> None:
        """See `Launcher.start`."""
        self._timeout_s = parallel.start_timeout_s
        for rank in range(parallel.world_size):
            self._start(rank, endpoint)

    def _start(self, rank: int, endpoint: Endpoint) -> None:
        # -P: else ranks would import a folder named torch in the working directory.
        command = [sys.executable, "-P", "-m", "gapless.launch.process_launcher"]
        env = {"TORCHDYNAMO_DISABLE": "1"} | os.environ
        process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, start_new_session=True, text=True)
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:  # with the secret, which must not be in the command line
            json.dump({"endpoint": asdict(endpoint), "rank": rank, "timeout_s": self._timeout_s}, process.stdin)
        self._ranks[rank] = process

    def replace(self, ranks: Collection[int], endpoint: Endpoint) -> None:
        """See `Launcher.replace`."""
        for rank in ranks:
            end_process(self._ranks[rank])
            self._start(rank, endpoint)

    def poll(self) -> dict[int, str]:
        """See `Launcher.poll`."""
        codes = {rank: process.poll() for rank, process in self._ranks.items()}
        return {rank: f"its process {how_ended(code)}" for rank, code in codes.items() if code is not None}

    def stop(self) -> None:
        """See `Launcher.stop`."""
        for process in self._ranks.values():
            end_process(process, waits.END_S)
        self._ranks.clear()


def main() -> int:
    """Run as the rank described on standard input. Return the exit code."""
    from ..runtime.pipeline.rank import run_rank

    address = json.load(sys.stdin)
    try:
        with messages_on_stderr():
            run_rank(Endpoint(**address["endpoint"]), address["rank"], "cpu", address["timeout_s"])
    except ImportError:
        raise
    except Exception:  # reported to the coordinator
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
