"""The blocks of a request in one group of layers, where layers have windows (`models/block_groups.py`)."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations


class BlockTable:
    """Blocks by place. Those before place `behind` lie behind the window, and are the request's no more.

    Messages name a block by its number plus `offset`, by which ranks know the group.
    """

    __slots__ = ("behind", "blocks", "num_sent", "offset")

    def __init__(self, offset: int, behind: int, cached: list[int]) -> None:
        self.offset = offset
        self.behind = behind
        self.blocks = [0] * behind + cached
        self.num_sent = 0

    def take_new(self) -> list[int]:
        """Return the names of the blocks that no message has named yet, and count them as sent."""
        offset = self.offset
        new = [block + offset for block in self.blocks[self.num_sent :]]
        self.num_sent = len(self.blocks)
        return new
