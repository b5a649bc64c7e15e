"""Stages lie on as few nodes as hold them, and stages that are split over nodes are found."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gapless.parallel.placement import nodes_of_stages, split_stages


@given(pp=st.integers(1, 12), tp=st.integers(1, 32), devices=st.integers(1, 16))
def test_stages_fill_nodes_in_order_and_none_is_split_that_fits(pp: int, tp: int, devices: int) -> None:
    stages = nodes_of_stages(pp, tp, devices)
    assert len(stages) == pp
    for nodes in stages:
        assert len(nodes) == -(-tp // devices)
        assert nodes == list(range(nodes[0], nodes[0] + len(nodes)))
    for before, after in pairwise(stages):
        assert after[0] in (before[-1], before[-1] + 1)
    for node in {node for nodes in stages for node in nodes}:
        assert sum(min(tp, devices) for nodes in stages if node in nodes) <= devices


def test_hand_made_placements() -> None:
    assert nodes_of_stages(4, 4, 8) == [[0], [0], [1], [1]]
    assert nodes_of_stages(3, 4, 6) == [[0], [1], [2]]
    assert nodes_of_stages(2, 8, 4) == [[0, 1], [2, 3]]


def test_split_stages_are_found_with_a_rank_on_each_of_their_nodes() -> None:
    assert split_stages({0: "a", 1: "a", 2: "b", 3: "b"}, 2) == {}
    assert split_stages({0: "a", 1: "b", 2: "b", 3: "b"}, 2) == {0: [0, 1]}
    assert split_stages({3: "c", 2: "a", 1: "b", 0: "b"}, 4) == {0: [0, 2, 3]}
