"""Where stages lie on nodes: as a simulation assumes it, and as the ranks of a real run turn out. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping


def nodes_of_stages(pp: int, tp: int, devices_per_node: int) -> list[list[int]]:
    """Return the nodes that hold each stage's ranks, where stages fill nodes in order.

    A stage that fits into a node is not split. One that does not takes as few whole nodes as it needs.
    """
    if tp <= devices_per_node:
        stages_a_node = devices_per_node // tp
        return [[stage // stages_a_node] for stage in range(pp)]
    nodes = nodes_of_a_stage(tp, devices_per_node)
    return [list(range(stage * nodes, (stage + 1) * nodes)) for stage in range(pp)]


def split_stages(node_of_rank: Mapping[int, str], tp: int) -> dict[int, list[int]]:
    """Return the stages whose ranks are on several nodes, each with the first of its ranks on each node."""
    first: dict[int, dict[str, int]] = {}
    for rank in sorted(node_of_rank):
        first.setdefault(rank // tp, {}).setdefault(node_of_rank[rank], rank)
    return {stage: list(ranks.values()) for stage, ranks in first.items() if len(ranks) > 1}


def nodes_of_a_stage(tp: int, devices_per_node: int) -> int:
    """Return how many nodes hold the ranks of one stage."""
    return -(-tp // devices_per_node)
