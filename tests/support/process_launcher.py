"""A launcher that starts each rank as a plain process, with a program that a test chooses."""

from __future__ import annotations

import os
from collections.abc import Collection

from gapless.conf.clusters import ClusterConfig
from gapless.conf.schema import HardwareConfig, ParallelConfig
from gapless.parallel.control import Endpoint
from gapless.runtime.pipeline.launcher import Launcher
from tests.support.forked import Process


def _serve(preparation: str, endpoint: Endpoint, rank: int) -> None:
    from gapless.runtime.pipeline.rank import run_rank

    exec(preparation, {"rank": rank})
    run_rank(endpoint, rank, "cpu", 60.0)


class ProcessLauncher(Launcher):
    """Starts ranks without Ray.

    Args:
        preparation: Python source that each rank runs first, in which `rank` is its number.
    """

    can_replace = True

    def __init__(self, preparation: str = "") -> None:
        self._preparation = preparation
        self.ranks: dict[int, Process] = {}

    def check(self, parallel: ParallelConfig, hardware: HardwareConfig) -> None:
        pass

    def start(
        self, endpoint: Endpoint, parallel: ParallelConfig, hardware: HardwareConfig, cluster: ClusterConfig
    ) -> None:
        for rank in range(parallel.world_size):
            self._start(rank, endpoint)

    def _start(self, rank: int, endpoint: Endpoint) -> None:
        with open(os.devnull, "w") as nowhere:
            self.ranks[rank] = Process(_serve, self._preparation, endpoint, rank, stderr=nowhere)

    def replace(self, ranks: Collection[int], endpoint: Endpoint) -> None:
        for rank in ranks:
            self._end(rank)
            self._start(rank, endpoint)

    def _end(self, rank: int) -> None:
        self.ranks[rank].kill()
        self.ranks[rank].wait()

    def poll(self) -> dict[int, str]:
        return {rank: "ended" for rank, process in self.ranks.items() if process.poll() is not None}

    def stop(self) -> None:
        for rank in self.ranks:
            self._end(rank)
