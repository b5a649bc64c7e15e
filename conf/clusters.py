"""Nodes, racks and links of a real or simulated cluster: `cluster.KEY=VALUE`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from .costs import LinkConfig, check_numbers
from .errors import check
from .ranges import AT_LEAST_ONE, check_ranges

AllReduceAlgorithm = Literal["ring", "tree", "two_level"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Cluster topology: devices in nodes, nodes in racks, and the links that a simulation sends over.

    A link that is null defaults to the one in `hardware.costs`; `spine` defaults to `network`. Links are full duplex.
    Ranks fill nodes in order, and nodes fill racks.
    """

    name: str = "default"
    """a label for reports"""
    devices_per_node: Annotated[int, AT_LEAST_ONE] = 8
    """ranks per node"""
    network_adapters: Annotated[int | None, AT_LEAST_ONE] = None
    """network adapters per node, shared by the ranks that send at the same time; null: one per device"""
    nodes_per_rack: Annotated[int | None, AT_LEAST_ONE] = None
    """nodes behind one switch; messages to other racks cross cluster.spine; null: one switch for all nodes"""
    oversubscription: Annotated[float, AT_LEAST_ONE] = 1.0
    """bandwidth of all adapters of a rack over that of its uplinks to other racks"""
    all_reduce_algorithms: tuple[AllReduceAlgorithm, ...] = ("ring", "tree")
    """algorithms for all-reduces over several nodes: ring, tree, two_level (within the nodes, then between them); the
    fastest is used"""
    all_reduce: LinkConfig | None = None
    """all-reduce within a node"""
    node: LinkConfig | None = None
    """point-to-point within a node"""
    network: LinkConfig | None = None
    """point-to-point between nodes of a rack, over one adapter"""
    spine: LinkConfig | None = None
    """point-to-point between racks, over one adapter"""

    def __post_init__(self) -> None:
        check_ranges(self, "cluster.")
        algorithms = list(self.all_reduce_algorithms)
        check("cluster.all_reduce_algorithms", algorithms, bool(algorithms), "one or more of ring, tree and two_level")
        for name in ("all_reduce", "node", "network", "spine"):
            if (link := getattr(self, name)) is not None:
                check_numbers(link, f"cluster.{name}")

    @property
    def adapters(self) -> int:
        """Number of network adapters of a node."""
        return self.devices_per_node if self.network_adapters is None else self.network_adapters

    @property
    def uplinks(self) -> float:
        """Bandwidth of a rack's uplinks, as a multiple of one adapter's."""
        return (self.nodes_per_rack or 1) * self.adapters / self.oversubscription
