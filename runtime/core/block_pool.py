"""The pool of KV blocks: which pages of the KV memory are free. Ranks have none: messages name new blocks."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from collections.abc import Sequence

from .prefix_cache import PrefixCache
from .request import Request

_NUM_PROBES = 16  # places where `_gap` looks for a run of free blocks


class CachedPrefix:
    """The first `num_blocks` blocks of a prompt in the prefix cache: by group of layers, those still of use."""

    __slots__ = ("blocks", "num_blocks")

    def __init__(self, num_blocks: int, blocks: list[list[int]]) -> None:
        self.num_blocks = num_blocks
        self.blocks = blocks


NOTHING_CACHED = CachedPrefix(0, [])


class BlockPool:
    """Hands out `num_blocks` pages of `block_size` tokens.

    The blocks of a request are mostly one contiguous run, which a CPU reads without a copy; correctness does not depend
    on it. To that end a request grows into the block after its last one if that is free. A new request starts in an
    unused lane of `lane_blocks` while there is one, then in the middle of a long run of free blocks.

    With `prefix_caching` blocks may hold content that later requests take over (`cache`). Those that no request uses
    count as free. They are evicted when there is no other free block.

    A request has one table here. Where layers have windows it has `num_groups`, and the pool `slides`
    (`core/windowed_pool.py`).
    """

    def __init__(self, num_blocks: int, block_size: int, lane_blocks: int = 1, *, prefix_caching: bool = False) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_free = num_blocks
        self.num_groups = 1
        self.slides = False
        self.cache = PrefixCache(num_blocks) if prefix_caching else None
        self._numbers = list(range(num_blocks))  # requests' lists of blocks are made of its slices, and share them
        self._is_free = bytearray(b"\x01") * num_blocks
        self._lane_blocks = max(1, min(lane_blocks, num_blocks))
        num_lanes = num_blocks // self._lane_blocks
        self._lane_used = [0] * (num_lanes + 1)  # the last entry: blocks past the last whole lane
        self._free_lanes = list(range(num_lanes - 1, -1, -1))
        self._is_listed = bytearray(b"\x01") * num_lanes

    @property
    def num_used(self) -> int:
        """The blocks that requests own; those kept for the prefix cache alone are not among them."""
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold `num_tokens`."""
        return -(-num_tokens // self.block_size)

    def grow(self, blocks: list[int], num_tokens: int) -> bool:
        """Extend a request's `blocks` in place to hold `num_tokens`.

        Returns:
            Whether enough blocks were free; if not, none is taken.
        """
        need = -(-num_tokens // self.block_size) - len(blocks)
        if need <= 0:
            return True
        if need > self.num_free:
            return False
        if self.cache is not None and (lacking := need - self.num_free + self.cache.num_idle) > 0:
            self._free_runs(self.cache.evict(lacking))
        if need == 1:  # as decodes do
            first = self._next(blocks, need)
            self._is_free[first] = 0
            self._count(first, 1, 1)
            blocks += self._numbers[first : first + 1]
            self.num_free -= 1
            return True
        while need:
            first = self._next(blocks, need)
            used = self._is_free.find(0, first, first + need)  # the run of free blocks ends there
            count = need if used < 0 else used - first
            count = min(count, self.num_blocks - first)
            self._is_free[first : first + count] = bytes(count)
            self._count(first, count, 1)
            blocks += self._numbers[first : first + count]
            self.num_free -= count
            need -= count
        return True

    def share(self, blocks: list[int], cached: Sequence[int]) -> None:
        """Give a request that has no `blocks` those of the cache that it begins with."""
        assert self.cache is not None
        assert not blocks
        self.num_free -= self.cache.num_idle_of(cached)
        self.cache.take(cached)
        blocks += cached

    def release(self, blocks: list[int]) -> None:
        """End a request's use of its blocks and empty the list."""
        if self.cache is None:
            self.num_free += len(blocks)
            self._free_runs(blocks)
        else:
            idle = self.cache.num_idle
            private = self.cache.release(blocks)
            self.num_free += len(private) + self.cache.num_idle - idle
            self._free_runs(private)
        blocks.clear()

    # What the scheduler calls for a request.

    def need(self, num_tokens: int, prefix: CachedPrefix) -> int:
        """Return the free blocks that an admission takes on the way to `num_tokens`, beginning with a cached prefix."""
        need = self.blocks_for(num_tokens)
        if prefix.num_blocks:
            assert self.cache is not None
            need -= prefix.num_blocks - self.cache.num_idle_of(prefix.blocks[0])
        return need

    def find(self, hashes: Sequence[bytes], most: int) -> CachedPrefix:
        """Return the cached blocks, `most` at most, that a request with these hashes begins with."""
        assert self.cache is not None
        found = self.cache.match(hashes, most)
        return CachedPrefix(len(found), [found]) if found else NOTHING_CACHED

    def take_over(self, request: Request, prefix: CachedPrefix) -> None:
        """Give a request without blocks a cached prefix, whose tokens it has as dispatched."""
        self.share(request.blocks, prefix.blocks[0])

    def reserve(self, request: Request, num_tokens: int) -> None:
        """Give a request that is admitted its blocks for `num_tokens`."""
        self.grow(request.blocks, num_tokens)

    def extend(self, request: Request, num_tokens: int) -> bool:
        """Extend a request's blocks to hold `num_tokens`, and return whether enough were free; if not, take none."""
        return self.grow(request.blocks, num_tokens)

    def cover(self, request: Request, length: int, spare: int) -> int:
        """Return how many of the next `length` tokens of a prompt have blocks, leaving `spare` ones if they can."""
        return length

    def slide(self, request: Request) -> None:
        """Free what lies behind windows, once the tokens that it has dispatched are part of a micro-batch."""

    def num_of(self, request: Request) -> int:
        """Return the number of blocks that a request uses."""
        return len(request.blocks)

    def take_back(self, request: Request) -> list[int]:
        """Take its blocks from a request. They are in use until they are released."""
        blocks, request.blocks = request.blocks, []
        return blocks

    def store(self, request: Request, stop: int) -> None:
        """Cache a request's blocks up to number `stop` - 1 that have not been offered to the cache."""
        assert self.cache is not None
        self.cache.store(request.blocks, request.block_hashes, request.num_blocks_hashed, stop)

    def forget(self, request: Request) -> None:
        """Let no further request take over what a request's blocks hold."""
        assert self.cache is not None
        self.cache.forget(request.blocks)

    def forget_content(self) -> None:
        """Take note that no block holds what it held. No request may own any."""
        assert self.num_free == self.num_blocks
        if self.cache is not None:
            self._free_runs(self.cache.clear())

    def _free_runs(self, blocks: list[int]) -> None:
        """Mark blocks as free, run by run."""
        at = 0
        if blocks and blocks == self._numbers[blocks[0] : blocks[0] + len(blocks)]:  # one run, as most are
            self._free(blocks[0], len(blocks))
            at = len(blocks)
        while at < len(blocks):
            first, stop = blocks[at], at + 1
            while stop < len(blocks) and blocks[stop] == first + stop - at:
                stop += 1
            self._free(first, stop - at)
            at = stop

    def _free(self, first: int, count: int) -> None:
        assert self._is_free.find(1, first, first + count) < 0, (first, count)
        self._is_free[first : first + count] = b"\x01" * count
        self._count(first, count, -1)

    def _count(self, first: int, count: int, sign: int) -> None:
        """Count blocks `first` .. `first + count - 1` in their lanes as used (`sign` 1) or as free again (-1)."""
        at, end = first, first + count
        while at < end:
            lane = at // self._lane_blocks
            stop = min(end, (lane + 1) * self._lane_blocks)
            self._lane_used[lane] += sign * (stop - at)
            if self._lane_used[lane] == 0 and lane < len(self._is_listed) and not self._is_listed[lane]:
                self._is_listed[lane] = 1
                self._free_lanes.append(lane)
            at = stop

    def _next(self, blocks: list[int], need: int) -> int:
        """Return the free block from which the request that owns `blocks` grows.

        From there on `need` blocks are free in a row, or as many as there are in any row.
        """
        if blocks:
            after = blocks[-1] + 1
            if after < self.num_blocks and self._is_free[after]:
                return after
        else:
            while self._free_lanes:
                lane = self._free_lanes.pop()
                self._is_listed[lane] = 0
                if self._lane_used[lane] == 0:
                    return lane * self._lane_blocks
        return self._gap(need)

    def _gap(self, need: int) -> int:
        """Return the first of `need` blocks in the middle of the longest of some free runs.

        So the request whose blocks end before that run may grow too.
        """
        free, best, length = self._is_free, 0, 0
        for probe in range(_NUM_PROBES):
            first = free.find(1, probe * self.num_blocks // _NUM_PROBES)
            if first < 0:  # none from here on
                break
            end = free.find(0, first)
            count = (self.num_blocks if end < 0 else end) - first
            if count > length:
                best, length = first, count
        return best + max(0, length - need) // 2
