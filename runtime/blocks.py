"""The pool of KV blocks: who owns which page of the cache. The ranks replay it from the blocks that a step names."""

from __future__ import annotations


class BlockPool:
    """`num_blocks` pages of `block_size` tokens.

    A request grows into the block after its last one where that is free, and a new one starts in an untouched lane of
    `lane_blocks` while there is any: the cache of a request is then one contiguous run, which a CPU reads without a
    copy. Correctness never rests on it.
    """

    def __init__(self, num_blocks: int, block_size: int, lane_blocks: int = 1) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_free = num_blocks
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
        for _ in range(need):
            block = self._next(blocks)
            self._is_free[block] = 0
            self._lane_used[block // self._lane_blocks] += 1
            blocks.append(block)
        self.num_free -= need
        return True

    def release(self, blocks: list[int]) -> None:
        """Give a request's blocks back; empties the list."""
        for block in blocks:
            assert not self._is_free[block], block
            self._is_free[block] = 1
            lane = block // self._lane_blocks
            self._lane_used[lane] -= 1
            if self._lane_used[lane] == 0 and lane < len(self._is_listed) and not self._is_listed[lane]:
                self._is_listed[lane] = 1
                self._free_lanes.append(lane)
        self.num_free += len(blocks)
        blocks.clear()

    def _next(self, blocks: list[int]) -> int:
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
        return self._is_free.find(1)
