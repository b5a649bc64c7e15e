"""An embedding that is the LM head too, packed: the head multiplies with it, and rows are read out of the blocks.

In bfloat16 a product of 1 to 64 rows takes 0.5 to 0.8 of the time of the one that reads the weight as it was loaded
(49,152 x 576, a core with AMX), which stays for float32 (`row_weight.py`): up to 16 rows that one is as fast.
"""

from __future__ import annotations

from ctypes import c_int32

import torch
from torch import Tensor, nn

from .packed import PackedWeight, can_pack
from .tiled import TiledWeight, can_tile


class PackedTable(PackedWeight):
    """A packed weight [out, in] whose rows can be read; only where `can_be_read`."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self._dtype = weight.dtype
        if self.can_be_read:
            words = self._in_size * weight.itemsize // 4  # of a row: one number each, or two
            address = torch.ops.mkldnn.data_ptr(self._packed)
            buffer = (c_int32 * (self._out_size * words)).from_address(address)
            self._words = torch.frombuffer(buffer, dtype=torch.int32).view(-1, words, self._block)

    @property
    def can_be_read(self) -> bool:
        """Whether oneDNN's layout is one that is known."""
        return self._block > 0

    def rows(self, ids: Tensor) -> Tensor:
        """Return the weight's rows, [T, in]."""
        return self._words[ids // self._block, :, ids % self._block].view(self._dtype)


def take_table(embedding: nn.Module) -> PackedTable | TiledWeight | None:
    """Pack an embedding's weight and free it; None, and the embedding as it is, where that cannot be."""
    weight: Tensor = embedding.weight  # type: ignore[assignment]
    if weight.dtype != torch.bfloat16 or not can_pack(weight):
        return None
    table = TiledWeight(weight.detach()) if can_tile(weight) else PackedTable(weight.detach())
    if isinstance(table, PackedTable) and not table.can_be_read:
        return None
    embedding.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
    return table
