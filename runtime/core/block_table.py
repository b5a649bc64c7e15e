"""A request's block table for one layer group, in models with sliding windows (`models/block_groups.py`)."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations


class BlockTable:
    """Block numbers by position. The first `behind` blocks have left the window, and no longer belong to the request.

    Messages contain a block's number plus `offset`, which identifies the group.
    """

    __slots__ = ("behind", "blocks", "num_sent", "offset")

    def __init__(self, offset: int, behind: int, cached: list[int]) -> None:
        self.offset = offset
        self.behind = behind
        self.blocks = [0] * behind + cached
        self.num_sent = 0

    def take_new(self) -> list[int]:
        """Return the blocks that have not been sent yet, as messages number them, and mark them as sent."""
        offset = self.offset
        new = [block + offset for block in self.blocks[self.num_sent :]]
        self.num_sent = len(self.blocks)
        return new
