"""The KV block allocator of models with sliding windows: one block table per layer group, over the same blocks."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

import sys
from collections.abc import Sequence

from ...models.block_groups import most_blocks
from .block_pool import NOTHING_CACHED, BlockPool, CachedPrefix
from .block_table import BlockTable
from .request import Request


class WindowedPool(BlockPool):
    """Frees a request's blocks once they are entirely behind a group's window.

    Blocks freed after one micro-batch can be reused by the next: stages compute micro-batches in order, so that all
    reads of a block precede the new writes.

    A request is promised blocks for its window and one more window ahead (`most_blocks`), so that it can always
    continue. A longer chunk takes further free blocks if there are any. Blocks shared with other requests stay in use
    when they leave a request's window; a chunk may then be cut short.

    Args:
        windows: per layer group, full attention first; None: full attention.
        whole: promise a request blocks for all its tokens, for policies without chunked prefill.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        lane_blocks: int = 1,
        *,
        windows: Sequence[int | None],
        prefix_caching: bool = False,
        whole: bool = False,
    ) -> None:
        super().__init__(num_blocks, block_size, lane_blocks, prefix_caching=prefix_caching)
        self.slides = True
        self.num_groups = len(windows)
        self._windows = [sys.maxsize if window is None else window for window in windows]
        self._most = [sys.maxsize if whole else most_blocks(window, block_size) for window in windows]
        self._keys = [bytes([group]) if group else b"" for group in range(len(windows))]  # of the prefix cache

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks a request of `num_tokens` is promised at most."""
        return self.need(num_tokens, NOTHING_CACHED)

    def need(self, num_tokens: int, prefix: CachedPrefix) -> int:
        """See `BlockPool.need`."""
        blocks, total = -(-num_tokens // self.block_size), 0
        for group, most in enumerate(self._most):
            total += min(blocks - self._behind(group, prefix.num_blocks * self.block_size), most)
            if prefix.num_blocks:
                assert self.cache is not None
                shared = prefix.blocks[group]
                total -= len(shared) - self.cache.num_idle_of(shared)
        return total

    def find(self, hashes: Sequence[bytes], most: int) -> CachedPrefix:
        """Return the longest cached prefix: all its blocks for full attention, the last window for the others."""
        end, group = min(most, len(hashes)), 0
        while end and group < self.num_groups:
            gap = self._missing(hashes, group, end)
            if gap < 0 or self._windows[group] == sys.maxsize:
                group += 1
            else:  # a shorter prefix moves the other windows: check them again
                group = self._windows.count(sys.maxsize)
            end = end if gap < 0 else gap
        if not end:
            return NOTHING_CACHED
        found: list[list[int]] = []
        for group in range(self.num_groups):
            blocks = [self._cached(hashes[i], group) for i in range(self._behind(group, end * self.block_size), end)]
            found.append([block for block in blocks if block is not None])
        return CachedPrefix(end, found)

    def _missing(self, hashes: Sequence[bytes], group: int, end: int) -> int:
        """Return -1 if a group has a prefix of `end` blocks, else the longest shorter prefix that it may have."""
        first = self._behind(group, end * self.block_size)
        numbers = range(end) if first == 0 else range(end - 1, first - 1, -1)  # shorter prefixes lack the last gap too
        for number in numbers:
            if self._cached(hashes[number], group) is None:
                return number
        return -1

    def _cached(self, digest: bytes, group: int) -> int | None:
        assert self.cache is not None
        return self.cache.block_of(digest + self._keys[group])

    def take_over(self, request: Request, prefix: CachedPrefix) -> None:
        """See `BlockPool.take_over`."""
        assert self.cache is not None
        for shared in prefix.blocks:
            self.num_free -= self.cache.num_idle_of(shared)
            self.cache.take(shared)
        self._open(request, prefix.blocks)

    def reserve(self, request: Request, num_tokens: int) -> None:
        """Allocate the blocks that a request of `num_tokens` is promised, up to the number of free ones."""
        if not request.tables:
            self._open(request, [[] for _ in self._most])
        blocks = -(-num_tokens // self.block_size)
        for table, most in zip(request.tables, self._most, strict=True):
            more = min(blocks, table.behind + most) - len(table.blocks)
            count = len(table.blocks) + min(more, self.num_free)
            self.grow(table.blocks, count * self.block_size)

    def extend(self, request: Request, num_tokens: int) -> bool:
        """See `BlockPool.extend`."""
        blocks = -(-num_tokens // self.block_size)
        if self._lacking(request, blocks) > self.num_free:
            return False
        for table in request.tables:
            self.grow(table.blocks, num_tokens)
        return True

    def cover(self, request: Request, length: int, spare: int) -> int:
        """See `BlockPool.cover`."""
        start, size = request.num_dispatched, self.block_size
        self.reserve(request, start + length)
        blocks, room = -(-(start + length) // size), max(0, self.num_free - spare)
        while self._lacking(request, blocks) > room:
            blocks -= 1
        self.extend(request, blocks * size)
        return min(length, min([len(table.blocks) for table in request.tables]) * size - start)

    def slide(self, request: Request) -> None:
        """Free the blocks that no token after those dispatched attends to."""
        for group, table in enumerate(request.tables):
            behind = self._behind(group, request.num_dispatched)
            if behind > table.behind:
                self.release(table.blocks[table.behind : behind])
                table.behind = behind

    def num_of(self, request: Request) -> int:
        """See `BlockPool.num_of`."""
        return sum([len(table.blocks) - table.behind for table in request.tables])

    def take_back(self, request: Request) -> list[int]:
        """See `BlockPool.take_back`. Blocks of the same tokens are adjacent."""
        most = max([len(table.blocks) for table in request.tables], default=0)
        tables, request.tables, request.blocks = request.tables, [], []
        return [t.blocks[place] for place in range(most) for t in tables if t.behind <= place < len(t.blocks)]

    def store(self, request: Request, stop: int) -> None:
        """See `BlockPool.store`."""
        assert self.cache is not None
        for table, key in zip(request.tables, self._keys, strict=True):
            first = max(request.num_blocks_hashed, table.behind)
            self.cache.store(table.blocks, request.block_hashes, first, stop, key)

    def forget(self, request: Request) -> None:
        """See `BlockPool.forget`. This includes blocks behind windows, which other requests may have by now."""
        assert self.cache is not None
        for table in request.tables:
            self.cache.forget(table.blocks)

    def _open(self, request: Request, cached: list[list[int]]) -> None:
        """Make the tables of a request whose dispatched tokens are in `cached` blocks, or will be transferred."""
        behind = [self._behind(group, request.num_dispatched) for group in range(self.num_groups)]
        request.tables = [BlockTable(i * self.num_blocks, behind[i], own) for i, own in enumerate(cached)]
        request.blocks = request.tables[0].blocks

    def _behind(self, group: int, num_tokens: int) -> int:
        """Return how many blocks of a request are entirely behind the window of its token `num_tokens`."""
        return max(0, num_tokens - self._windows[group] + 1) // self.block_size

    def _lacking(self, request: Request, blocks: int) -> int:
        """Return how many blocks a request lacks for `blocks` in each group."""
        return sum([max(0, blocks - len(table.blocks)) for table in request.tables])
