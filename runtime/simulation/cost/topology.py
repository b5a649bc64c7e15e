"""Predicts communication times in a cluster: messages between ranks, and collectives of a stage."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

import math

from ....conf.clusters import ClusterConfig
from ....conf.costs import CostsConfig
from ....parallel.placement import StageLink, nodes_of_a_stage
from .link import FasterLink, Link

_TREE_SHARE = 0.9  # bandwidth of a tree relative to a ring, as in NCCL (src/graph/tuning.cc)


class Topology:
    """The links of a cluster of one kind of device; a stage uses as few nodes as possible.

    Args:
        costs: the device's constants; links in `cluster` override them.
        graphs: collectives may use kernels in a CUDA graph, if those are faster than the library's.
        between_racks: the stage's nodes span several racks.
    """

    def __init__(
        self, cluster: ClusterConfig, costs: CostsConfig, tp: int, *, between_racks: bool = False, graphs: bool = False
    ) -> None:
        self._tp = tp
        self._nodes = nodes_of_a_stage(tp, cluster.devices_per_node)
        self._ranks_a_node = -(-tp // self._nodes)
        self._adapters = min(self._ranks_a_node, cluster.adapters)  # used by the stage's ranks on one node
        self._between_racks = between_racks
        self._algorithms = cluster.all_reduce_algorithms
        own = costs.graph_all_reduce if graphs and cluster.all_reduce is None else None
        self._inside = FasterLink(cluster.all_reduce or costs.all_reduce, own)
        self._node = Link(cluster.node or costs.node)
        network = cluster.network or costs.network
        self._network = Link(network)
        self._spine = Link(cluster.spine or network)
        self._uplinks = cluster.uplinks

    def send(self, size: float, link: StageLink) -> float:
        """Return the seconds of a message of `size` bytes from each rank of a stage to the next stage."""
        if not link.between_nodes:
            return self._node.seconds(size)
        seconds = self._network.seconds(size * link.per_adapter)
        if link.between_racks:
            seconds = max(seconds, self._spine.seconds(size * max(link.per_adapter, link.per_uplink)))
        return seconds

    def all_reduce(self, size: float) -> float:
        """Return the seconds of an all-reduce of `size` bytes over the stage's ranks, by the fastest algorithm."""
        return self._collective(2, size)

    def gather(self, size: float) -> float:
        """Return the seconds of an all-gather of `size` bytes in total over the stage's ranks."""
        return self._collective(1, size)

    def _collective(self, passes: int, size: float) -> float:
        """Return the seconds of an all-reduce (two passes: reduce-scatter, all-gather) or an all-gather (one pass).

        Within a node, it is the link's time. Over several nodes, with R ranks on n nodes:

        - `ring`: each link of a ring over all ranks carries `passes` (R - 1) / R of the bytes. The bottleneck is a link
          within a node or all adapters of a node together. Network latency counts `passes` (n - 1) times. An all-gather
          uses a ring or `two_level`.
        - `tree`: each link carries twice the bytes, at 0.9 of the rate, and latency counts 2 log2(n) times, as in
          NCCL's model (`src/graph/tuning.cc`).
        - `two_level`: each node's ranks reduce-scatter, then each rank all-reduces its shard with its peers on the
          other nodes. The network carries `passes` (n - 1) / n of the bytes, and its latency counts `passes` log2(n)
          times.
        """
        ranks, nodes = self._tp, self._nodes
        if nodes == 1:
            return self._inside.seconds(passes * (ranks - 1) / ranks * size)
        hop, depth, times = self._hop_seconds, math.ceil(math.log2(nodes)), []
        if "ring" in self._algorithms or passes == 1:
            part = passes * (ranks - 1) / ranks * size
            times.append(max(self._inside.seconds(part), self._across(part)) + passes * (nodes - 1) * hop)
        if "tree" in self._algorithms and passes == 2:
            part = 2 * size / _TREE_SHARE
            times.append(max(self._inside.seconds(part), self._across(part)) + 2 * depth * hop)
        if "two_level" in self._algorithms:
            a_node = self._ranks_a_node
            inside = self._inside.seconds(passes * (a_node - 1) / a_node * size)
            across = self._across(passes * (nodes - 1) / nodes * size)
            times.append(inside + across + (passes * depth - 1) * hop)
        return min(times)

    def _across(self, size: float) -> float:
        """Return the seconds until `size` bytes have left a node over all of its adapters that the stage uses."""
        seconds = self._network.seconds(size / self._adapters)
        if self._between_racks:
            seconds = max(seconds, self._spine.seconds(size / min(self._adapters, self._uplinks)))
        return seconds

    @property
    def _hop_seconds(self) -> float:
        """Extra latency of an empty message between nodes compared with one in a node, which includes the launch."""
        least = self._network.least_seconds
        if self._between_racks:
            least = max(least, self._spine.least_seconds)
        return max(0.0, least - self._node.least_seconds)
