"""The pool of KV blocks: who owns which page of the cache. The ranks replay it from the blocks that a step names."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

_PROBES = 16  # places where a run of free blocks is looked for


class BlockPool:
    """`num_blocks` pages of `block_size` tokens.

    A request grows into the block after its last one where that is free, and a new one starts in an untouched lane of
    `lane_blocks` while there is any, then in the middle of a long run of free blocks: the cache of a request is then
    mostly one contiguous run, which a CPU reads without a copy. Correctness never rests on it.
    """

    def __init__(self, num_blocks: int, block_size: int, lane_blocks: int = 1) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_free = num_blocks
        self._numbers = list(range(num_blocks))  # requests' lists of blocks are made of its slices, and share them
        self._is_free = bytearray(b"\x01") * num_blocks
        self._lane_blocks = max(1, min(lane_blocks, num_blocks))
        num_lanes = num_blocks // self._lane_blocks
        self._lane_used = [0] * (num_lanes + 1)  # the last entry: blocks past the last whole lane
        self._free_lanes = list(range(num_lanes - 1, -1, -1))
        self._is_listed = bytearray(b"\x01") * num_lanes

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def grow(self, blocks: list[int], num_tokens: int) -> bool:
        """Extend a request's `blocks` in place to hold `num_tokens`; all or nothing."""
        need = -(-num_tokens // self.block_size) - len(blocks)
        if need <= 0:
            return True
        if need > self.num_free:
            return False
        if need == 1:  # a decode: no run to look for
            first = self._next(blocks, need)
            self._is_free[first] = 0
            self._count(first, 1, 1)
            blocks += self._numbers[first : first + 1]
            self.num_free -= 1
            return True
        while need:
            first = self._next(blocks, need)
            # The run of free blocks from there on, as long as it is wanted.
            taken = self._is_free.find(0, first, first + need)
            count = need if taken < 0 else taken - first
            count = min(count, self.num_blocks - first)
            self._is_free[first : first + count] = bytes(count)
            self._count(first, count, 1)
            blocks += self._numbers[first : first + count]
            self.num_free -= count
            need -= count
        return True

    def release(self, blocks: list[int]) -> None:
        """Give a request's blocks back; empties the list."""
        self.num_free += len(blocks)
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
        blocks.clear()

    def _free(self, first: int, count: int) -> None:
        assert self._is_free.find(1, first, first + count) < 0, (first, count)
        self._is_free[first : first + count] = b"\x01" * count
        self._count(first, count, -1)

    def _count(self, first: int, count: int, sign: int) -> None:
        """Blocks `first` .. `first + count - 1` are taken (1) or free again (-1): their lanes count them."""
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
        """Where `need` blocks lie in the middle of the longest of some free runs: what lies before it may grow too."""
        free, best, length = self._is_free, 0, 0
        for probe in range(_PROBES):
            first = free.find(1, probe * self.num_blocks // _PROBES)
            if first < 0:  # none from here on
                break
            end = free.find(0, first)
            count = (self.num_blocks if end < 0 else end) - first
            if count > length:
                best, length = first, count
        return best + max(0, length - need) // 2
