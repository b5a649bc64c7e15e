"""The KV block allocator. It runs in the coordinator only: ranks get the numbers of new blocks in messages."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from collections.abc import Sequence

from .prefix_cache import PrefixCache
from .request import Request

_NUM_PROBES = 16  # start positions from which `_gap` looks for a run of free blocks


class CachedPrefix:
    """A prefix-cache hit of `num_blocks` blocks. `blocks`: per layer group, those within its window."""

    __slots__ = ("blocks", "num_blocks")

    def __init__(self, num_blocks: int, blocks: list[list[int]]) -> None:
        self.num_blocks = num_blocks
        self.blocks = blocks


NOTHING_CACHED = CachedPrefix(0, [])


class BlockPool:
    """Allocates `num_blocks` pages of `block_size` tokens.

    A request's blocks are mostly contiguous, so that a CPU reads them without a copy; correctness does not depend on
    it. A request grows into the block after its last one if that is free. A new request starts in an unused lane
    (`lane_blocks` consecutive blocks) if there is one, else in the middle of a long run of free blocks.

    With `prefix_caching`, later requests may reuse the content of blocks (`cache`). Cached blocks without a user count
    as free, and are evicted when no other block is free.

    A request has one block table here. In models with sliding windows it has `num_groups`, and the pool `slides`
    (`core/windowed_pool.py`).
    """

    def __init__(self, num_blocks: int, block_size: int, lane_blocks: int = 1, *, prefix_caching: bool = False) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_free = num_blocks
        self.num_groups = 1
        self.slides = False
        self.cache = PrefixCache(num_blocks) if prefix_caching else None
        self._numbers = list(range(num_blocks))  # requests' block lists are made of its slices, to share the integers
        self._is_free = bytearray(b"\x01") * num_blocks
        self._lane_blocks = max(1, min(lane_blocks, num_blocks))
        num_lanes = num_blocks // self._lane_blocks
        self._lane_used = [0] * (num_lanes + 1)  # the last entry: blocks past the last whole lane
        self._free_lanes = list(range(num_lanes - 1, -1, -1))
        self._is_listed = bytearray(b"\x01") * num_lanes

    @property
    def num_used(self) -> int:
        """The number of blocks that requests use, without idle blocks of the prefix cache."""
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
        """Fill the empty `blocks` of a request with the cached blocks of its prefix."""
        assert self.cache is not None
        assert not blocks
        self.num_free -= self.cache.num_idle_of(cached)
        self.cache.take(cached)
        blocks += cached

    def release(self, blocks: list[int]) -> None:
        """Release a request's blocks and empty the list."""
        if self.cache is None:
            self.num_free += len(blocks)
            self._free_runs(blocks)
        else:
            idle = self.cache.num_idle
            private = self.cache.release(blocks)
            self.num_free += len(private) + self.cache.num_idle - idle
            self._free_runs(private)
        blocks.clear()

    # The interface to the scheduler.

    def need(self, num_tokens: int, prefix: CachedPrefix) -> int:
        """Return how many free blocks a request takes to reach `num_tokens`, given its cached prefix."""
        need = self.blocks_for(num_tokens)
        if prefix.num_blocks:
            assert self.cache is not None
            need -= prefix.num_blocks - self.cache.num_idle_of(prefix.blocks[0])
        return need

    def find(self, hashes: Sequence[bytes], most: int) -> CachedPrefix:
        """Return the longest cached prefix of a request with these block hashes, up to `most` blocks."""
        assert self.cache is not None
        found = self.cache.match(hashes, most)
        return CachedPrefix(len(found), [found]) if found else NOTHING_CACHED

    def take_over(self, request: Request, prefix: CachedPrefix) -> None:
        """Give a request without blocks its cached prefix. Its `num_dispatched` includes the prefix already."""
        self.share(request.blocks, prefix.blocks[0])

    def reserve(self, request: Request, num_tokens: int) -> None:
        """Allocate the blocks of a newly admitted request for `num_tokens`."""
        self.grow(request.blocks, num_tokens)

    def extend(self, request: Request, num_tokens: int) -> bool:
        """Extend a request's blocks to hold `num_tokens`, and return whether enough were free; if not, take none."""
        return self.grow(request.blocks, num_tokens)

    def cover(self, request: Request, length: int, spare: int) -> int:
        """Return how many of a prompt's next `length` tokens have blocks, with `spare` blocks left free if possible."""
        return length

    def slide(self, request: Request) -> None:
        """Free blocks that have left the window. Call it once the dispatched tokens are part of a micro-batch."""

    def num_of(self, request: Request) -> int:
        """Return the number of blocks that a request uses."""
        return len(request.blocks)

    def take_back(self, request: Request) -> list[int]:
        """Detach a request's blocks and return them. They stay in use until released."""
        blocks, request.blocks = request.blocks, []
        return blocks

    def store(self, request: Request, stop: int) -> None:
        """Cache a request's blocks from `num_blocks_hashed` up to `stop - 1`."""
        assert self.cache is not None
        self.cache.store(request.blocks, request.block_hashes, request.num_blocks_hashed, stop)

    def forget(self, request: Request) -> None:
        """Hide the content of a request's blocks from later requests."""
        assert self.cache is not None
        self.cache.forget(request.blocks)

    def forget_content(self) -> None:
        """Clear the prefix cache, after the blocks have lost their content. No request may own blocks."""
        assert self.num_free == self.num_blocks
        if self.cache is not None:
            self._free_runs(self.cache.clear())

    def _free_runs(self, blocks: list[int]) -> None:
        """Mark blocks as free, run by run."""
        at = 0
        if blocks and blocks == self._numbers[blocks[0] : blocks[0] + len(blocks)]:  # the common case: one run
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

        This is the block after its last one, for a new request the start of an unused lane, or else from `_gap`.
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
        """Return where to place `need` blocks in the middle of the longest of several free runs.

        The request whose blocks end before that run can then grow too.
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
