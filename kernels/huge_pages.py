"""Memory of a CPU in huge pages, for what is read from beginning to end again and again: weights.

The KV cache is no such memory: requests touch some of each head's slots, and whole huge pages take long to get.

A core follows an address across a page of 4 KB only by looking the next one up. On a core of Sapphire Rapids, reading
150 MB took 9.2 GB/s from small pages and 13.0 from those of 2 MB. Kernels give them to who asks (`madvise`, as most
distributions set it); where there are none, small ones serve.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from ctypes import CDLL

import torch
from torch import Tensor

_ARENA = 64 << 20  # bytes that are reserved at once, of which only those that are written to take memory
_ALIGNMENT = 64  # bytes


class _Arena:
    """Memory from which tensors are cut, one after the other. It goes when the last of them does."""

    def __init__(self, size: int) -> None:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(AttributeError, OSError):  # not Linux, or no huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes, self._used = torch.frombuffer(memory, dtype=torch.uint8), 0

    def cut(self, size: int) -> Tensor | None:
        begin = self._used
        if begin + size > len(self._bytes):
            return None
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return self._bytes[begin : begin + size]


_arena = _Arena(mmap.PAGESIZE)


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor on the CPU that is to be filled."""
    global _arena
    size = math.prod(shape) * dtype.itemsize
    memory = _arena.cut(size)
    if memory is None:
        _arena = _Arena(max(_ARENA, size))
        memory = _arena.cut(size)
        assert memory is not None
    return memory.view(dtype).view(shape)


def give_back() -> None:
    """Give memory that was freed back to the system, as that of a weight that has been copied."""
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        CDLL(None).malloc_trim(0)


def copy(tensor: Tensor) -> Tensor:
    """Return a contiguous copy of a tensor on the CPU."""
    return empty(*tensor.shape, dtype=tensor.dtype).copy_(tensor)
