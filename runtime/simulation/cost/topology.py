"""Predicts the time of what crosses the links of a cluster: messages between ranks, and collectives of a stage."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

import math

from ...conf.clusters import ClusterConfig
from ...conf.costs import CostsConfig
from ...parallel.placement import StageLink, nodes_of_a_stage
from .link import FasterLink, Link

_TREE_SHARE = 0.9  # of a ring's rate that a tree reaches, as NCCL assumes (src/graph/tuning.cc)


class Topology:
    """The links of a cluster of one kind of device, with the ranks of one stage on as few nodes as hold them.

    Args:
        costs: the device's constants; `cluster` has the links that differ.
        graphs: collectives may be kernels in a CUDA graph; the faster of those and the library's are taken.
        between_racks: the stage's nodes lie in several racks.
    """

    def __init__(
        self, cluster: ClusterConfig, costs: CostsConfig, tp: int, *, between_racks: bool = False, graphs: bool = False
    ) -> None:
        self._tp = tp
        self._nodes = nodes_of_a_stage(tp, cluster.devices_per_node)
        self._ranks_a_node = -(-tp // self._nodes)
        self._adapters = min(self._ranks_a_node, cluster.adapters)  # those that the stage's ranks on a node use
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
        """Return the seconds of a message of `size` bytes of each rank of a stage to the next one."""
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
        """Return the seconds until each of the stage's ranks has all of `size` bytes, of which each has a slice."""
        return self._collective(1, size)

    def _collective(self, passes: int, size: float) -> float:
        """Return the seconds of an all-reduce (two passes: reduce-scatter, gather) or of a gather (one).

        Within a node, `all_reduce` is as measured. Over several, with R ranks on n nodes:

        - `ring`: each link of a ring of all ranks carries `passes` (R - 1) / R of the bytes. The slowest sets the pace:
          one within a node, or all adapters of a node together. Latency of the network counts `passes` (n - 1) times.
          A gather is always one, or `two_level`.
        - `tree`: each link carries twice the bytes, at 0.9 of the rate, and latency counts 2 log2(n) times. So NCCL
          compares it with the ring (`src/graph/tuning.cc`).
        - `two_level`: each node's ranks reduce to a slice each, then each rank reduces its slice with its peers on the
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
        """How much longer a message without bytes takes to another node than within one, where launches cost too."""
        least = self._network.least_seconds
        if self._between_racks:
            least = max(least, self._spine.least_seconds)
        return max(0.0, least - self._node.least_seconds)
