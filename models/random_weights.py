"""Weights from a seed, slice by slice, the same whatever the mesh."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

_BLOCK_ELEMENTS = 1 << 20
_STD = 0.02


class RandomTensors:
    """Weights from a seed: matrices normal with a deviation of 0.02, norms 1, biases 0.

    Each block of rows has its own generator, seeded by the tensor's name, so that a rank makes only what it holds and
    the model is the same whatever the mesh.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
        self._shapes = shapes
        self._seed = seed
        self._last: tuple[str, int, torch.Tensor] | None = None

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._shapes.get(name)

    def read(self, name: str, rows: slice, columns: slice | None) -> torch.Tensor:
        if columns is None:
            return torch.full((rows.stop - rows.start,), 0.0 if name.endswith("bias") else 1.0)
        per_block = max(1, _BLOCK_ELEMENTS // self._shapes[name][1])
        parts = []
        for block in range(rows.start // per_block, -(-rows.stop // per_block)):
            first = block * per_block
            part = self._block(name, block, per_block)
            parts.append(part[max(rows.start - first, 0) : rows.stop - first, columns])
        return torch.cat(parts) if len(parts) > 1 else parts[0]
    def _block(self, name: str, block: int, per_block: int) -> torch.Tensor:
        if self._last is None or self._last[:2] != (name, block):
            digest = hashlib.blake2b(f"{self._seed}/{name}/{block}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
            tensor = torch.empty(per_block, self._shapes[name][1]).normal_(0.0, _STD, generator=generator)
            self._last = (name, block, tensor)
        return self._last[2]
