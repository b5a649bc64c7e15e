"""Blocks that requests share: content, users, and which is evicted first."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.runtime.core.block_pool import BlockPool
from gapless.runtime.core.prefix_cache import extend_hashes
from tests.support.tiers import examples

BLOCK = 4


def hashes_of(tokens: list[int], salt: str = "") -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, BLOCK, salt)
    return hashes


def pool_of(num_blocks: int) -> BlockPool:
    return BlockPool(num_blocks, BLOCK, 4, prefix_caching=True)


def store(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Give a request blocks for `tokens`, shared as far as they are cached, and cache the others."""
    assert pool.cache is not None
    hashes, blocks = hashes_of(tokens), []
    cached = pool.cache.match(hashes, len(hashes))
    if cached:
        pool.share(blocks, cached)
    assert pool.grow(blocks, len(tokens))
    pool.cache.store(blocks, hashes, len(cached), len(hashes))
    return blocks


def test_a_hash_says_all_tokens_from_the_first() -> None:
    a, b = hashes_of(list(range(12))), hashes_of([*range(4), 9, *range(5, 12)])
    assert a[0] == b[0]
    assert not {*a[1:]} & {*b[1:]}
    assert len(hashes_of(list(range(11)))) == 2, "full blocks only"
    assert not {*a} & {*hashes_of(list(range(12)), "another")}
    in_parts: list[bytes] = []
    for first in range(0, 12, BLOCK):
        extend_hashes(in_parts, list(range(first, first + BLOCK)), BLOCK, "")
    assert in_parts == a


def test_blocks_without_a_user_keep_their_content_until_memory_is_needed() -> None:
    pool = pool_of(6)
    tokens = list(range(12))
    first = store(pool, tokens)
    kept = list(first)
    pool.release(first)
    assert (pool.num_free, pool.num_used) == (6, 0)
    second = store(pool, tokens)
    assert second == kept
    third: list[int] = []
    assert not pool.grow(third, 4 * BLOCK), "three are in use"
    assert pool.grow(third, 3 * BLOCK)
    assert not {*third} & {*second}


def test_the_last_block_of_what_was_unused_the_longest_is_evicted_first() -> None:
    pool = pool_of(8)
    assert pool.cache is not None
    old, new = list(range(16)), list(range(100, 116))
    for tokens in (old, new):
        pool.release(store(pool, tokens))
    other: list[int] = []
    assert pool.grow(other, 3 * BLOCK)
    assert len(pool.cache.match(hashes_of(old), 4)) == 1
    assert len(pool.cache.match(hashes_of(new), 4)) == 4


def test_what_is_forgotten_is_shared_no_more() -> None:
    pool = pool_of(8)
    assert pool.cache is not None
    blocks = store(pool, list(range(8)))
    pool.cache.forget(blocks)
    assert pool.cache.match(hashes_of(list(range(8))), 2) == []
    assert store(pool, list(range(8))) != blocks
    pool.release(blocks)
    assert pool.num_free == 6
    rest: list[int] = []
    assert pool.grow(rest, 6 * BLOCK)


@settings(max_examples=examples(200))
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.integers(1, 30)), max_size=60),
    st.integers(8, 24),
)
def test_no_content_is_lost_while_in_use_and_no_block_leaks(
    actions: list[tuple[int, int, int]], num_blocks: int
) -> None:
    """Requests of three texts, of any length each, come and go. Every block holds what its users think."""
    pool = pool_of(num_blocks)
    cache = pool.cache
    assert cache is not None
    holds: dict[int, bytes] = {}  # what was last written to a block
    owned: dict[int, tuple[list[int], list[bytes]]] = {}
    for who, text, length in actions:
        if who in owned:
            pool.release(owned.pop(who)[0])
        else:
            hashes = hashes_of([1000 * text + i for i in range(length)])
            cached = cache.match(hashes, len(hashes))
            need = pool.blocks_for(length) - len(cached) + cache.num_idle_of(cached)
            blocks: list[int] = []
            if need <= pool.num_free:
                pool.share(blocks, cached)
                assert [holds[block] for block in blocks] == hashes[: len(blocks)]
                assert pool.grow(blocks, length)
                for block, digest in zip(blocks[len(cached) :], hashes[len(cached) :], strict=False):
                    holds[block] = digest
                cache.store(blocks, hashes, len(cached), len(hashes))
                owned[who] = blocks, hashes
        for blocks, hashes in owned.values():
            assert [holds[block] for block in blocks[: len(hashes)]] == hashes
        used = {block for blocks, _ in owned.values() for block in blocks}
        assert len(used) == pool.num_used
        assert pool.num_free - cache.num_idle >= 0
    for blocks, _ in owned.values():
        pool.release(blocks)
    assert pool.num_free == num_blocks
    everything: list[int] = []
    assert pool.grow(everything, num_blocks * BLOCK)
    assert sorted(everything) == list(range(num_blocks))
