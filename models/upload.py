"""Copies what the host knows of a micro-batch to the device, in one transfer for which the host does not wait."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Return each of `arrays`, 1-D int64, as a tensor on the device. On a CPU they share the arrays' memory.

    On CUDA they are views of one tensor. It is copied from page-locked memory, in the order of the current stream: what
    is queued there later may read it. torch's allocator of page-locked memory reuses it once the copy is done.
    """
    assert all(array.dtype == np.int64 and array.ndim == 1 for array in arrays)
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    packed = torch.from_numpy(np.concatenate(arrays)).pin_memory().to(device, non_blocking=True)
    return list(packed.split([len(array) for array in arrays]))
