"""A Ray cluster of several nodes on this machine, whose nodes a benchmark takes away and gives back."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

from .faults import ranks_below

# Ray's default takes many seconds to see that a node is gone.
_SOON = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 200,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 2,
}
_BACK_AFTER_S = 5.0


class RayNodes:
    """A head without room for ranks, and `count` nodes of `num_cpus` each.

    Attributes:
        address: for `parallel.ray_address`.
    """

    def __init__(self, count: int, num_cpus: int) -> None:
        from ray.cluster_utils import Cluster

        self._num_cpus = num_cpus
        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": _SOON}
        # Its hooks for the end would be signal handlers, which only the main thread may set; `close` ends all nodes.
        self._cluster: Any = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
        self.address: str = self._cluster.address
        for _ in range(count):
            self._cluster.add_node(num_cpus=num_cpus)

    def ranks(self) -> list[int]:
        """Return the processes on all nodes that run a rank."""
        return sorted(pid for node in self._cluster.worker_nodes for pid in self._ranks_of(node))

    def lose_one(self, rng: random.Random) -> None:
        """Take away a node that holds a rank, and add another one some seconds later."""
        node = rng.choice([node for node in self._cluster.worker_nodes if self._ranks_of(node)])
        ranks = self._ranks_of(node)
        self._cluster.remove_node(node, allow_graceful=False)
        while any(Path(f"/proc/{pid}").exists() for pid in ranks):
            time.sleep(0.01)
        threading.Timer(_BACK_AFTER_S, self._cluster.add_node, kwargs={"num_cpus": self._num_cpus}).start()

    @staticmethod
    def _ranks_of(node: Any) -> list[int]:
        return [pid for each in node.all_processes.get("raylet", ()) for pid in ranks_below(each.process.pid)]

    def close(self) -> None:
        self._cluster.shutdown()
