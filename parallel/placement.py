"""Places stages on nodes and racks, and counts the messages on the links between them. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..conf.clusters import ClusterConfig


@dataclass(frozen=True, slots=True)
class StageLink:
    """The links that a stage's messages to the next stage cross, and how many messages share these links.

    Attributes:
        between_nodes: at least one rank sends to another node.
        between_racks: at least one rank sends to another rack.
        per_adapter: maximum messages that share a network adapter in one direction in a full pipeline; 1 or more.
        per_uplink: the same for a link between racks, if that link is as fast as an adapter.
    """

    between_nodes: bool
    between_racks: bool = False
    per_adapter: float = 1.0
    per_uplink: float = 1.0


def nodes_of_stages(pp: int, tp: int, devices_per_node: int, replica: int = 0) -> list[list[int]]:
    """Return the nodes of each stage's ranks, if replicas and their stages fill nodes in order.

    A stage that fits into a node is not split. A larger stage takes as few whole nodes as possible.
    """
    stages = range(replica * pp, (replica + 1) * pp)
    if tp <= devices_per_node:
        stages_a_node = devices_per_node // tp
        return [[stage // stages_a_node] for stage in stages]
    nodes = nodes_of_a_stage(tp, devices_per_node)
    return [list(range(stage * nodes, (stage + 1) * nodes)) for stage in stages]


def nodes_of_a_stage(tp: int, devices_per_node: int) -> int:
    """Return the number of nodes that one stage's ranks need."""
    return -(-tp // devices_per_node)


def rack_of(node: int, cluster: ClusterConfig) -> int:
    """Return the rack of a node, if nodes fill racks in order."""
    return 0 if cluster.nodes_per_rack is None else node // cluster.nodes_per_rack


def stages_span_racks(pp: int, tp: int, cluster: ClusterConfig, replicas: int = 1) -> list[bool]:
    """Return for each stage whether its ranks span several racks in at least one replica."""
    spans = [False] * pp
    if cluster.nodes_per_rack is not None and tp > cluster.devices_per_node:
        for replica in range(replicas):
            for stage, nodes in enumerate(nodes_of_stages(pp, tp, cluster.devices_per_node, replica)):
                spans[stage] |= rack_of(nodes[0], cluster) != rack_of(nodes[-1], cluster)
    return spans


def stage_links(pp: int, tp: int, cluster: ClusterConfig, replicas: int = 1) -> list[list[StageLink]]:
    """Return for each replica the links from each stage to the next, if replicas and stages fill nodes in order.

    In a full pipeline all stages send at the same time. So the messages that leave a node share its adapters, and so do
    arriving messages; links are full duplex. A stage that spans several nodes is also always in an all-reduce, which
    adds one message per rank at the adapters.
    """
    per_node = cluster.devices_per_node
    placed = [nodes_of_stages(pp, tp, per_node, replica) for replica in range(replicas)]
    ranks = -(-tp // nodes_of_a_stage(tp, per_node))  # of a stage on one node; each sends a message
    out, into, out_of_rack, into_rack = Counter[int](), Counter[int](), Counter[int](), Counter[int]()
    for stages in placed:
        sends = [pair for before, after in pairwise(stages) for pair in _crossings(before, after)]
        all_reduces = [pair for nodes in stages for pair in _crossings(nodes, (*nodes[1:], nodes[0]))]  # a ring
        for source, target in (*sends, *all_reduces):
            out[source] += ranks
            into[target] += ranks
            rack, next_rack = rack_of(source, cluster), rack_of(target, cluster)
            if rack != next_rack:
                out_of_rack[rack] += ranks
                into_rack[next_rack] += ranks
    of_a_rank = 1.0 if tp <= per_node else 2.0  # messages per rank: its send, plus an all-reduce if a stage spans nodes
    uplinks = cluster.uplinks

    def link(before: Sequence[int], after: Sequence[int]) -> StageLink:
        crossings = _crossings(before, after)
        if not crossings:
            return StageLink(between_nodes=False)
        per_adapter = max(max(out[a], into[b]) for a, b in crossings) / cluster.adapters
        racks = _crossings(*zip(*((rack_of(a, cluster), rack_of(b, cluster)) for a, b in crossings), strict=True))
        per_uplink = max((max(out_of_rack[a], into_rack[b]) for a, b in racks), default=0) / uplinks
        return StageLink(True, bool(racks), max(of_a_rank, per_adapter), max(1.0, per_uplink))

    return [[link(before, after) for before, after in pairwise(stages)] for stages in placed]


def _crossings(before: Sequence[int], after: Sequence[int]) -> list[tuple[int, int]]:
    """Return (source, target) of the messages that leave their place (a node or a rack)."""
    return [(a, b) for a, b in zip(before, after, strict=True) if a != b]
