"""A Ray cluster of several nodes on this machine, whose nodes can be lost and replaced."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

from .faults import ranks_below

# By default Ray takes many seconds to detect a lost node.
_SOON = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 200,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 2,
}
_BACK_AFTER_S = 5.0


class RayNodes:
    """A head node without CPUs, and `count` nodes of `num_cpus` each.

    Attributes:
        address: for `parallel.ray_address`.
    """

    def __init__(self, count: int, num_cpus: int) -> None:
        from ray.cluster_utils import Cluster

        self._num_cpus = num_cpus
        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": _SOON}
        # Shutdown hooks set signal handlers, which only the main thread may do; `close` stops all nodes.
        self._cluster: Any = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
        self.address: str = self._cluster.address
        for _ in range(count):
            self._cluster.add_node(num_cpus=num_cpus)

    def ranks(self) -> list[int]:
        """Return the rank processes of all nodes."""
        return sorted(pid for node in self._cluster.worker_nodes for pid in self._ranks_of(node))

    def lose_one(self, rng: random.Random) -> None:
        """Remove a node that runs a rank, and add another node some seconds later."""
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
