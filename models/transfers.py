"""Asynchronous copies between host and device.

On CUDA they need pinned memory. torch's pinned-memory allocator reuses a block once its queued copies are done.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Return `arrays`, 1-D int64 or float64, as tensors on the device. On a CPU they share the arrays' memory.

    On CUDA they are views of one tensor, copied once on the current stream, so that later work on this stream may read
    them.
    """
    assert all(array.dtype in (np.int64, np.float64) and array.ndim == 1 for array in arrays)
    tensors = [torch.from_numpy(array) for array in arrays]
    if device.type == "cpu" or not tensors:
        return tensors
    packed = torch.cat([tensor.view(torch.int64) for tensor in tensors]).pin_memory().to(device, non_blocking=True)
    parts = packed.split([len(array) for array in arrays])
    return [part.view(tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]


class Download:
    """An asynchronous copy of int64 or float64 tensors to the host: the constructor queues it, `read` waits for it."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._copied: torch.cuda.Event | None = None
        if tensors[0].device.type == "cuda":
            packed = torch.cat([tensor.reshape(-1).view(torch.int64) for tensor in tensors])
            host = torch.empty(len(packed), dtype=torch.int64, pin_memory=True)
            host.copy_(packed, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
            parts = host.split([tensor.numel() for tensor in tensors])
            self._tensors = [
                part.view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)
            ]

    def read(self) -> list[np.ndarray]:
        """Wait until the device has computed and copied the tensors, and return them."""
        if self._copied is not None:
            self._copied.synchronize()
        return [tensor.numpy() for tensor in self._tensors]
