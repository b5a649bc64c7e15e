"""The nodes and racks of a cluster, and the links between them, simulated or real: `cluster.KEY=VALUE`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .costs import LinkConfig, check_numbers
from .errors import check, check_each

AllReduceAlgorithm = Literal["ring", "tree", "two_level"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Nodes of devices in racks, and the links that a simulation sends over.

    If a link is null, that of the hardware's constants (`hardware.costs`) is used; for `spine`, the link of `network`.
    Links are full duplex. Ranks fill nodes in order, and nodes fill racks.
    """

    name: str = "default"
    """a label for reports"""
    devices_per_node: int = 8
    """ranks that share a node and its fast links"""
    network_adapters: int | None = None
    """network adapters of a node, shared by the ranks that send at the same time; null: one a device"""
    nodes_per_rack: int | None = None
    """nodes behind one switch; messages to other nodes cross cluster.spine. null: all nodes are behind one"""
    oversubscription: float = 1.0
    """rate of all adapters of a rack over the rate of its links to the other racks"""
    all_reduce_algorithms: tuple[AllReduceAlgorithm, ...] = ("ring", "tree")
    """algorithms of the library for an all-reduce over several nodes: ring, tree, two_level (within the nodes, then
    between them); it takes the fastest"""
    all_reduce: LinkConfig | None = None
    """all-reduces within a node"""
    node: LinkConfig | None = None
    """sends within a node"""
    network: LinkConfig | None = None
    """sends between nodes of a rack, over one adapter"""
    spine: LinkConfig | None = None
    """sends between racks, over one adapter"""

    def __post_init__(self) -> None:
        numbers = ("devices_per_node", "network_adapters", "nodes_per_rack", "oversubscription")
        check_each("cluster.", self, lambda n: n >= 1, "1 or more", *numbers)
        algorithms = list(self.all_reduce_algorithms)
        check("cluster.all_reduce_algorithms", algorithms, bool(algorithms), "one or several of ring, tree, two_level")
        for name in ("all_reduce", "node", "network", "spine"):
            if (link := getattr(self, name)) is not None:
                check_numbers(link, f"cluster.{name}")

    @property
    def adapters(self) -> int:
        """Number of network adapters of a node."""
        return self.devices_per_node if self.network_adapters is None else self.network_adapters

    @property
    def uplinks(self) -> float:
        """Rate of a rack's links to the other racks, as a multiple of the rate of one adapter."""
        return (self.nodes_per_rack or 1) * self.adapters / self.oversubscription
