"""The block tables of a rank, beside a list of blocks for each request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gapless.models.block_tables import BlockTables

STEPS = st.lists(st.tuples(st.integers(0, 99), st.lists(st.integers(0, 1000), max_size=40)), max_size=200)


@given(steps=STEPS, keep=st.integers(1, 100))
def test_tables_are_the_lists(steps: list[tuple[int, list[int]]], keep: int) -> None:
    """Requests come, get blocks and go; rows are used again, and the array grows both ways."""
    tables, lists = BlockTables(), dict[int, list[int]]()
    for request, blocks in steps:
        if request not in lists:
            if len(lists) == keep:
                gone = next(iter(lists))
                tables.drop(gone)
                del lists[gone]
            tables.add(request)
            lists[request] = []
        tables.append(request, blocks)
        lists[request] += blocks
        assert tables.of(request).tolist() == lists[request]
    least = min(map(len, lists.values()), default=0)
    found = tables.of_each(list(lists), least)
    assert found.tolist() == [blocks[:least] for blocks in lists.values()]


def test_many_requests_and_long_tables() -> None:
    tables = BlockTables()
    for request in range(200):
        tables.add(request)
        tables.append(request, range(request, request + 300))
    assert [row.tolist() for row in tables.of_each([199, 0, 64], 300)] == [
        list(range(n, n + 300)) for n in (199, 0, 64)
    ]


def test_what_is_read_stays() -> None:
    """A micro-batch that was prepared keeps its blocks while the row is given to another request."""
    tables = BlockTables()
    tables.add(1)
    tables.append(1, [5, 6])
    one, each = tables.of(1), tables.of_each([1], 2)
    tables.drop(1)
    tables.add(2)
    tables.append(2, [7, 8])
    assert one.tolist() == [5, 6]
    assert each.tolist() == [[5, 6]]
