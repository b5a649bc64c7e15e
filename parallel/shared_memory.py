"""Shared-memory collectives for the ranks of a stage, if all of them run on one node's CPU.

Through gloo an all-reduce of 256 tokens of 768 floats takes milliseconds, longer than the preceding GEMM.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
from collections.abc import Sequence
from ctypes import c_int64
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels.cpp_library import ELEMENTS, NoLibraryError, load
from ..kernels.shared_memory import SHARED_MEMORY, Reduction
from .frames import ConnectionLost

_FOLDER = Path("/dev/shm")
_COUNTER_BYTES = 64
_CAPACITY = 1 << 16  # floats per buffer, so that the chunks of an all-reduce stay in the cache
_NAME_BYTES = 16


class SharedMemory:
    """The shared memory of a group of ranks. All of them call its methods in the same order."""

    def __init__(self, memory: mmap.mmap, rank: int, size: int, capacity: int, timeout_s: float) -> None:
        self._memory = memory  # stays mapped as long as this object lives
        self._round = c_int64(0)
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._ended = c_int64(0)
        self._common = (base, rank, size, capacity, ctypes.byref(self._ended), ctypes.byref(self._round))
        self._size = size
        self._timeout_s = timeout_s

    @classmethod
    def open(cls, group: dist.ProcessGroup, timeout_s: float) -> SharedMemory | None:
        """Share memory with the ranks of `group`, which must all call this. None on all ranks if any rank cannot.

        Args:
            group: The ranks, connected by gloo.
            timeout_s: How long a rank waits for another rank.
        """
        rank, size, capacity = group.rank(), group.size(), _CAPACITY
        name, has_library, memory = torch.zeros(_NAME_BYTES, dtype=torch.uint8), False, None
        num_bytes = size * (_COUNTER_BYTES + 2 * capacity * 4)
        with contextlib.suppress(NoLibraryError, OSError):
            has_library = all(load(SHARED_MEMORY, dtype) for dtype in ELEMENTS)
            if rank == 0:
                token = secrets.token_bytes(_NAME_BYTES)
                memory = _map(token, num_bytes, os.O_CREAT | os.O_EXCL)
                name = torch.frombuffer(bytearray(token), dtype=torch.uint8)
        dist.broadcast(name, group=group, group_src=0)
        token = bytes(name.tolist())
        if rank and has_library:
            with contextlib.suppress(OSError):
                memory = _map(token, num_bytes, 0)
        opened = torch.tensor([has_library and memory is not None], dtype=torch.int32)
        dist.all_reduce(opened, op=dist.ReduceOp.MIN, group=group)
        if rank == 0:
            _path(token).unlink(missing_ok=True)  # the memory lives until the last rank unmaps it
        if not opened.item():
            return None
        assert memory is not None
        return cls(memory, rank, size, capacity, timeout_s)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum the contiguous tensor `x`, of a type in `ELEMENTS`, in place; bitwise identical on all ranks.

        Raises:
            RuntimeError: a rank did not arrive in time.
        """
        self.check(load(SHARED_MEMORY, x.dtype).all_reduce(*self._common, x.data_ptr(), x.numel(), self._timeout_s))
        return x

    def gather(self, x_RV: Tensor, shares: Sequence[range], own: int) -> Tensor:
        """Return the rows of share `own` of the ranks' [R, V] tensors, column-concatenated, [share, size * V].

        The tensors' rows are whole 4-byte words, and `shares` are contiguous row ranges: one for each rank, or one.

        Raises:
            RuntimeError: a rank did not arrive in time.
        """
        x_RW = x_RV.contiguous().view(torch.float32)  # words, which are only copied
        W, ends = x_RW.shape[1], (c_int64 * (len(shares) + 1))(0, *(share.stop for share in shares))
        out = x_RW.new_empty(len(shares[own]), self._size * W)
        given = (x_RW.data_ptr(), ends, len(shares), own, W, self._timeout_s, out.data_ptr())
        self.check(load(SHARED_MEMORY, torch.float32).gather(*self._common, *given))
        return out.view(x_RV.dtype)

    def end(self) -> None:
        """Make a collective that waits for other ranks fail now. Any thread may call it."""
        self._ended.value = 1

    def reduction(self, dtype: torch.dtype) -> Reduction:
        """Return the arguments for an all-reduce called from C++, whose return code goes to `check`."""
        base, rank, size, capacity, _, _ = self._common
        state = ctypes.addressof(self._ended), ctypes.addressof(self._round)
        function = ctypes.cast(load(SHARED_MEMORY, dtype).all_reduce, ctypes.c_void_p)
        return Reduction(function, base, rank, size, capacity, *state, self._timeout_s)

    def check(self, late: int) -> None:
        """Raise if the return code of a collective reports a timeout."""
        if late and self._ended.value:
            raise ConnectionLost("the pipeline is being restarted")
        if late:
            raise RuntimeError(f"timed out: a rank of this stage did not come within {self._timeout_s:g} s")


def _path(token: bytes) -> Path:
    return _FOLDER / f"gapless-{token.hex()}"


def _map(token: bytes, num_bytes: int, flags: int) -> mmap.mmap:
    descriptor = os.open(_path(token), os.O_RDWR | flags, 0o600)
    try:
        if flags:
            os.posix_fallocate(descriptor, 0, num_bytes)
        if os.fstat(descriptor).st_size != num_bytes:
            raise OSError("not the memory of these ranks")
        return mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)
