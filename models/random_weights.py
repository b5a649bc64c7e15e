"""Generates random weights from a seed, shard by shard. They are the same on every mesh."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from .safetensors_folder import TensorSource

_BLOCK_ELEMENTS = 1 << 20
_WEIGHT_STD = 0.02


class RandomTensors(TensorSource):
    """Random tensors from a seed: normal matrices with a standard deviation of 0.02, norms of 1, biases of 0.

    Each block of rows has its own generator, seeded by the tensor's name and the block. So a rank generates only the
    blocks that it needs, and the model is the same on every mesh.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
        self._shapes = shapes
        self._seed = seed
        self._last: tuple[str, int, Tensor] | None = None

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor; None if the architecture has no such tensor."""
        return self._shapes.get(name)

    def read(self, name: str, rows: slice, columns: slice | None) -> Tensor:
        """Generate a slice of a tensor. The values do not depend on how the tensor is sliced."""
        if columns is None:
            return torch.full((rows.stop - rows.start,), 0.0 if name.endswith("bias") else 1.0)
        per_block = max(1, _BLOCK_ELEMENTS // self._shapes[name][1])
        parts = []
        for block in range(rows.start // per_block, -(-rows.stop // per_block)):
            first = block * per_block
            part = self._block(name, block, per_block)
            parts.append(part[max(rows.start - first, 0) : rows.stop - first, columns])
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _block(self, name: str, block: int, per_block: int) -> Tensor:
        if self._last is None or self._last[:2] != (name, block):
            digest = hashlib.blake2b(f"{self._seed}/{name}/{block}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
            tensor = torch.empty(per_block, self._shapes[name][1]).normal_(0.0, _WEIGHT_STD, generator=generator)
            self._last = (name, block, tensor)
        return self._last[2]
