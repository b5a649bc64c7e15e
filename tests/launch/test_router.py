"""The router of replicas: the least load, turns among equals, and the replica that knows a prompt."""

from __future__ import annotations

import random

from gapless.launch.server.router import Router

BLOCK = 4
NUM_BLOCKS = 100  # a replica that knows a prompt may have 100 tokens more to compute than the least


def router(replicas: int, *, by_prefix: bool = True, num_blocks: int = NUM_BLOCKS) -> Router:
    return Router(replicas, block_size=BLOCK, kv_tokens=num_blocks * BLOCK, by_prefix=by_prefix)


def test_the_least_load_wins_and_equals_take_turns() -> None:
    plain = router(3, by_prefix=False)
    assert plain.choose([1], {0: 5, 1: 3, 2: 9}) == 1
    assert [plain.choose([1], {0: 0, 1: 0, 2: 0}) for _ in range(4)] == [2, 0, 1, 2]
    assert [plain.choose([1], {0: 7, 2: 7}) for _ in range(3)] == [0, 2, 0]


def test_a_prompt_goes_where_its_longest_prefix_went() -> None:
    by_prefix = router(3)
    system, other = list(range(40)), list(range(100, 140))
    assert by_prefix.choose(system, {0: 0, 1: 1, 2: 1}) == 0
    assert by_prefix.choose(other, {0: 1, 1: 0, 2: 1}) == 1
    assert by_prefix.choose([*system, 1, 2, 3, 4], {0: 50, 1: 0, 2: 0}) == 0
    assert by_prefix.choose([*other, 1, 2, 3, 4], {0: 0, 1: 50, 2: 0}) == 1
    assert by_prefix.choose([*system[:8], 9, 9, 9, 9], {0: 50, 1: 0, 2: 0}) == 0, "two blocks are known"
    assert by_prefix.choose([*system[:3], 9, 9, 9, 9], {0: 50, 1: 0, 2: 1}) == 1, "not one whole block is"
    assert router(2, by_prefix=False).choose(system, {0: 1, 1: 0}) == 1


def test_a_prefix_does_not_outweigh_a_load_that_is_far_too_high() -> None:
    by_prefix = router(2)
    prompt = list(range(40))
    assert by_prefix.choose(prompt, {0: 0, 1: 0}) == 0
    assert by_prefix.choose(prompt, {0: 100, 1: 0}) == 0
    assert by_prefix.choose(prompt, {0: 101, 1: 0}) == 1
    assert by_prefix.choose(prompt, {0: 60, 1: 50}) == 1, "both know it now, and the lighter one takes it"


def test_a_prompt_of_another_salt_is_not_known() -> None:
    """Its blocks are not shared, so that going where it went gains nothing."""
    by_prefix = router(2)
    prompt = list(range(40))
    assert by_prefix.choose(prompt, {0: 0, 1: 1}, "alice") == 0
    assert by_prefix.choose(prompt, {0: 50, 1: 0}, "alice") == 0
    assert by_prefix.choose(prompt, {0: 50, 1: 0}, "bob") == 1
    assert by_prefix.choose(prompt, {0: 50, 1: 51}, "bob") == 1


def test_a_prompt_that_is_asked_again_stays_known() -> None:
    by_prefix = router(2, num_blocks=10)
    often, others = list(range(5 * BLOCK)), range(100, 100 + 20 * BLOCK, 4 * BLOCK)
    assert by_prefix.choose(often, {0: 0, 1: 1}) == 0
    for first in others:
        by_prefix.choose(list(range(first, first + 4 * BLOCK)), {0: 0, 1: 1})
        assert by_prefix.choose(often, {0: 1, 1: 0}) == 0


def test_a_dead_replica_is_passed_over() -> None:
    by_prefix = router(2)
    prompt = list(range(40))
    assert by_prefix.choose(prompt, {0: 0, 1: 0}) == 0
    assert by_prefix.choose(prompt, {1: 0}) == 1


def test_what_is_remembered_is_bounded_and_keeps_beginnings() -> None:
    rng = random.Random(0)
    by_prefix = router(2, num_blocks=10)
    first = [rng.randrange(1000) for _ in range(8 * BLOCK)]
    assert by_prefix.choose(first, {0: 0, 1: 1}) == 0
    by_prefix.choose([rng.randrange(1000) for _ in range(6 * BLOCK)], {0: 0, 1: 1})
    assert by_prefix.choose(first[: 4 * BLOCK], {0: 1, 1: 0}) == 0, "the first 4 of 8 blocks are left"
    for _ in range(100):
        by_prefix.choose([rng.randrange(1000) for _ in range(50 * BLOCK)], {0: 0, 1: 1})
    assert by_prefix.choose(first, {0: 1, 1: 0}) == 1
    assert all(len(sent._hashes) <= 10 for sent in by_prefix._sent)
