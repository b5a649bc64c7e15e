"""Idle intervals that are joined keep each second, with its cause and its micro-batch."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gapless.runtime.analysis.ledger.idle import IdleColumns

# Of one stage in order: whether idle or busy, for how long, of which cause, before which micro-batch.
times = st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 1), st.integers(0, 1)), max_size=12)


@given(times, st.randoms())
def test_seconds_keep_their_cause_and_no_busy_one_becomes_idle(times: list[tuple[bool, int, int, int]], rng) -> None:
    pieces, expected, now = [], {}, 0
    for is_idle, length, cause, place in times:
        if is_idle:
            whole = (np.array([float(now)]), np.array([float(now + length)]), np.array([cause]), np.array([place]))
            pieces.append(IdleColumns(*whole))
            expected |= dict.fromkeys(range(now, now + length), (cause, place))
        now += length
    rng.shuffle(pieces)
    found = IdleColumns.joined([IdleColumns(np.zeros(0), np.zeros(0), np.zeros(0, int), np.zeros(0, int)), *pieces])
    rows = list(zip(found.start, found.end, found.cause, found.place, strict=True))
    assert {s: (cause, place) for start, end, cause, place in rows for s in range(int(start), int(end))} == expected
    for (_, end, *kind), (start, _, *next_kind) in itertools.pairwise(rows):
        assert start > end or (start == end and kind != next_kind)
