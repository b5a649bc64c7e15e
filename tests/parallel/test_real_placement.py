"""Stages share nodes as far as there is room, nodes and racks follow each other, and bad placements are found."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gapless.parallel.real_placement import Place, changes, in_order, split_stages, stages_together

PLACES = st.builds(Place, st.sampled_from("abcdef")).map(lambda place: Place(place.node, "xyz"[ord(place.node) % 3]))


@given(pp=st.integers(1, 20), tp=st.integers(1, 8), devices=st.integers(1, 16), rooms=st.lists(st.integers(0, 16)))
def test_stages_share_a_node_where_there_is_room(pp: int, tp: int, devices: int, rooms: list[int]) -> None:
    tried = stages_together(pp, tp, devices, rooms)
    assert tried == sorted(set(tried), reverse=True)
    assert tried[-1] == 1
    for stages in tried[:-1]:
        assert stages <= pp
        assert stages * tp <= devices
        assert sum(room // (stages * tp) for room in rooms) * stages >= pp


def test_as_many_stages_as_the_description_and_the_nodes_allow() -> None:
    assert stages_together(8, 2, 8, [8, 8]) == [4, 2, 1]  # three together need three nodes
    assert stages_together(8, 2, 4, [8, 8]) == [2, 1]
    assert stages_together(4, 2, 8, [4, 4]) == [2, 1]
    assert stages_together(2, 8, 4, [8, 8]) == [1]


@given(st.lists(PLACES, min_size=1, max_size=12), st.none() | PLACES)
def test_nodes_and_racks_follow_each_other(places: list[Place], last: Place | None) -> None:
    order = in_order(places, last)
    assert sorted(order) == list(range(len(places)))
    placed = [places[number] for number in order] + ([] if last is None else [last])
    for where in ([place.node for place in placed], [place.rack for place in placed]):
        crossed, least = changes(where)
        assert crossed == least == len(set(where)) - 1


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=9))
def test_changes_of_place(where: list[str]) -> None:
    crossed, least = changes(where)
    assert crossed == sum(a != b for a, b in pairwise(where)) >= least
    assert changes(sorted(where)) == (least, least)


def test_split_stages_are_found_with_a_rank_on_each_of_their_nodes() -> None:
    assert split_stages({0: "a", 1: "a", 2: "b", 3: "b"}, 2) == {}
    assert split_stages({0: "a", 1: "b", 2: "b", 3: "b"}, 2) == {0: [0, 1]}
    assert split_stages({3: "c", 2: "a", 1: "b", 0: "b"}, 4) == {0: [0, 2, 3]}
