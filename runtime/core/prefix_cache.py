"""The prefix cache: full KV blocks that later requests with the same prefix reuse."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

_DIGEST_BYTES = 16


def extend_hashes(hashes: list[bytes], tokens: Sequence[int], block_size: int, salt: str) -> None:
    """Append the hashes of the full blocks of `tokens`, which continue the blocks of `hashes`.

    A block's hash covers its tokens and the hash of the previous block, so that equal hashes mean equal prefixes. The
    first hash also covers `salt`, so that requests with different salts share no blocks.
    """
    parent = hashes[-1] if hashes else salt.encode()
    packed, width = array("q", tokens).tobytes(), 8 * block_size
    for first in range(0, len(packed) - width + 1, width):
        parent = blake2b(parent + packed[first : first + width], digest_size=_DIGEST_BYTES).digest()
        hashes.append(parent)


class PrefixCache:
    """Maps block hashes to cached blocks, with reference counts and LRU eviction.

    A block without users is idle: it keeps its content until its memory is needed. The block that has been idle longest
    is evicted first. Of the blocks that a request leaves idle, the last is evicted first, since the others are useful
    without it.

    Attributes:
        queries: prompt tokens of admitted requests.
        hits: prompt tokens found in the cache.
    """

    def __init__(self, num_blocks: int) -> None:
        self.queries = 0
        self.hits = 0
        self._block: dict[bytes, int] = {}
        self._hash: dict[int, bytes] = {}
        self._users = [0] * num_blocks  # reference counts of cached blocks
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        """Return the number of cached blocks."""
        return len(self._hash)

    @property
    def num_idle(self) -> int:
        """The number of cached blocks without a user."""
        return len(self._idle)

    def match(self, hashes: Sequence[bytes], most: int) -> list[int]:
        """Return the longest cached prefix of a request with these block hashes, up to `most` blocks."""
        found: list[int] = []
        blocks = self._block
        for digest in hashes[:most]:
            block = blocks.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def num_idle_of(self, blocks: Sequence[int]) -> int:
        """Return how many of these cached blocks are idle."""
        users = self._users
        return sum([users[block] == 0 for block in blocks])

    def take(self, blocks: Sequence[int]) -> None:
        """Add a user to each of these cached blocks."""
        users, idle = self._users, self._idle
        for block in blocks:
            if users[block] == 0:
                del idle[block]
            users[block] += 1

    def block_of(self, digest: bytes) -> int | None:
        """Return the cached block with a hash, None without one."""
        return self._block.get(digest)

    def store(self, blocks: Sequence[int], hashes: Sequence[bytes], first: int, stop: int, group: bytes = b"") -> None:
        """Cache a request's blocks `first` .. `stop - 1`. Content that is cached already stays in its block.

        `group` is appended to the hashes, since blocks of the same tokens differ between layer groups.
        """
        for number in range(first, stop):
            digest, block = hashes[number] + group if group else hashes[number], blocks[number]
            if digest not in self._block and block not in self._hash:
                self._block[digest] = block
                self._hash[block] = digest
                self._users[block] = 1

    def release(self, blocks: Sequence[int]) -> list[int]:
        """Remove a user from each cached block. Return the blocks that are not cached."""
        users, cached = self._users, self._hash
        private: list[int] = []
        for place in range(len(blocks) - 1, -1, -1):
            block = blocks[place]
            if block not in cached:
                private.append(block)
                continue
            users[block] -= 1
            if users[block] == 0:
                self._idle[block] = None
        private.reverse()
        return private

    def evict(self, count: int) -> list[int]:
        """Evict the `count` blocks that have been idle longest, and return them."""
        evicted: list[int] = []
        for _ in range(count):
            block = self._idle.popitem(last=False)[0]
            digest = self._hash.pop(block)
            if self._block.get(digest) == block:
                del self._block[digest]
            evicted.append(block)
        return evicted

    def clear(self) -> list[int]:
        """Evict all blocks, which must be idle, and return them."""
        assert len(self._idle) == len(self._hash)
        return self.evict(len(self._idle))

    def forget(self, blocks: Sequence[int]) -> None:
        """Hide these blocks from later requests. Current users keep them."""
        for block in blocks:
            digest = self._hash.get(block)
            if digest is not None and self._block.get(digest) == block:
                del self._block[digest]
