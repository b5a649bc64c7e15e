"""The prefix cache: full KV blocks that a later request with the same first tokens takes over."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

_DIGEST_BYTES = 16


def extend_hashes(hashes: list[bytes], tokens: Sequence[int], block_size: int, salt: str) -> None:
    """Append the hashes of the full blocks of `tokens`, which follow the blocks that `hashes` has.

    A block's hash is made of its tokens and of the hash of the block before it, so that equal hashes mean equal tokens
    from the first on. The first block's is made of `salt` as well: requests of other salts never have it.
    """
    parent = hashes[-1] if hashes else salt.encode()
    packed, width = array("q", tokens).tobytes(), 8 * block_size
    for first in range(0, len(packed) - width + 1, width):
        parent = blake2b(parent + packed[first : first + width], digest_size=_DIGEST_BYTES).digest()
        hashes.append(parent)


class PrefixCache:
    """Knows which blocks hold which tokens, who uses them, and which unused one has been so the longest.

    A block is in use by as many requests as share it. Without any it is idle: it keeps its content until its memory is
    needed, and the block that has been idle the longest is evicted first. Of the blocks that a request leaves idle
    the last is evicted first, since the others are of use without it.

    Attributes:
        queries: prompt tokens of the requests that have been admitted.
        hits: those of them that were taken over.
    """

    def __init__(self, num_blocks: int) -> None:
        self.queries = 0
        self.hits = 0
        self._block: dict[bytes, int] = {}
        self._hash: dict[int, bytes] = {}
        self._users = [0] * num_blocks  # of cached blocks
        self._idle: OrderedDict[int, None] = OrderedDict()  # the first has been idle the longest

    def __len__(self) -> int:
        """Return the number of cached blocks."""
        return len(self._hash)

    @property
    def num_idle(self) -> int:
        """The number of blocks that hold tokens but that no request uses."""
        return len(self._idle)

    def match(self, hashes: Sequence[bytes], most: int) -> list[int]:
        """Return the cached blocks, `most` at most, that a request with these hashes begins with."""
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
        """Count one more user of each of these cached blocks."""
        users, idle = self._users, self._idle
        for block in blocks:
            if users[block] == 0:
                del idle[block]
            users[block] += 1

    def block_of(self, digest: bytes) -> int | None:
        """Return the cached block of a hash."""
        return self._block.get(digest)

    def store(self, blocks: Sequence[int], hashes: Sequence[bytes], first: int, stop: int, group: bytes = b"") -> None:
        """Cache a request's blocks number `first` .. `stop` - 1, which it uses. Known content stays where it is.

        `group` is appended to their hashes: blocks of the same tokens in other groups of layers hold something else.
        """
        for number in range(first, stop):
            digest, block = hashes[number] + group if group else hashes[number], blocks[number]
            if digest not in self._block and block not in self._hash:
                self._block[digest] = block
                self._hash[block] = digest
                self._users[block] = 1

    def release(self, blocks: Sequence[int]) -> list[int]:
        """Count one user less of each cached block. Return the blocks that are not cached."""
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
        """Forget the `count` blocks that have been idle the longest, and return them."""
        evicted: list[int] = []
        for _ in range(count):
            block = self._idle.popitem(last=False)[0]
            digest = self._hash.pop(block)
            if self._block.get(digest) == block:
                del self._block[digest]
            evicted.append(block)
        return evicted

    def clear(self) -> list[int]:
        """Forget all blocks, which nobody uses any more, and return them."""
        assert len(self._idle) == len(self._hash)
        return self.evict(len(self._idle))

    def forget(self, blocks: Sequence[int]) -> None:
        """Let no further request take over what these blocks hold. Those who use them keep them."""
        for block in blocks:
            digest = self._hash.get(block)
            if digest is not None and self._block.get(digest) == block:
                del self._block[digest]
