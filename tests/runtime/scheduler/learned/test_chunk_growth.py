"""Chunks that grow while prompts pile up: `runtime/scheduler/learned/chunk_growth.py`."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gapless.runtime.core.queue_snapshot import QueueSnapshot
from gapless.runtime.scheduler.learned.chunk_growth import ChunkGrowth

CHUNK, TILE, DEPTH = 256, 128, 2


def queues(backlog: int, waiting: int = 100, running: int = 10, admissible: float = 100.0) -> QueueSnapshot:
    return QueueSnapshot(DEPTH, backlog, waiting, running, 0, admissible)


def after(growth: ChunkGrowth, rounds: int, snapshot: QueueSnapshot, decodes: float = 0.0) -> list[int]:
    return [growth.grown(DEPTH * number, CHUNK, snapshot, decodes) for number in range(rounds)]


@given(
    st.lists(
        st.builds(queues, st.integers(0, 10**6), st.integers(0, 500), st.integers(0, 500), st.floats(0, 500)),
        min_size=1,
        max_size=60,
    ),
    st.floats(0, 300),
    st.integers(1, 4096),
)
def test_a_chunk_is_never_less_than_it_was_nor_more_than_the_most(
    rounds: list[QueueSnapshot], decodes: float, most: int
) -> None:
    growth = ChunkGrowth(24, most, TILE)
    sizes = [growth.grown(DEPTH * number, CHUNK, snapshot, decodes) for number, snapshot in enumerate(rounds)]
    assert all(CHUNK <= size <= max(CHUNK, most) for size in sizes)
    assert all(b - a <= TILE for a, b in pairwise(sizes))


def test_it_grows_by_half_a_chunk_in_sixteen_micro_batches_until_the_backlog_takes_the_iterations() -> None:
    sizes = after(ChunkGrowth(24, 2048, TILE), 60, queues(24 * 1024))
    assert sizes[:9] == [256] * 8 + [384]
    assert sorted(set(sizes)) == [256, 384, 512, 640, 768, 896, 1024]
    assert sizes[-1] == 1024


def test_it_shrinks_at_once() -> None:
    growth = ChunkGrowth(24, 2048, TILE)
    after(growth, 60, queues(24 * 1024))
    assert growth.grown(120, CHUNK, queues(1000), 0.0) == CHUNK


def test_it_stays_while_slots_or_blocks_are_full_and_until_there_is_ample_room() -> None:
    growth = ChunkGrowth(24, 2048, TILE)
    assert set(after(growth, 60, queues(10**6, running=100, admissible=10))) == {CHUNK}
    assert set(after(growth, 60, queues(10**6, running=100, admissible=40))) == {CHUNK}
    assert max(after(growth, 60, queues(10**6, running=100, admissible=60))) > CHUNK


def test_one_long_prompt_is_no_pile() -> None:
    assert set(after(ChunkGrowth(24, 2048, TILE), 60, queues(10**6, waiting=1))) == {CHUNK}
    assert max(after(ChunkGrowth(24, 2048, TILE), 60, queues(10**6, waiting=3))) == 384
