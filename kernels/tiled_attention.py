"""Paged attention in bfloat16 on a CPU with AMX (`tiled_attention.cpp`): one call for all segments of a micro-batch."""

from __future__ import annotations

from ctypes import Structure, byref, c_float, c_int64, c_void_p

import numpy as np
import torch
from torch import Tensor

from .cpp_library import CppFile, find_tiled

_FILE = CppFile("tiled_attention", attend="ppppp", multiplies_tiles=":i")
_KEYS, _NUMBERS = 16, 32  # per tile: block size and head dimension must be multiples of them


class _Cache(Structure):
    """`Cache` of `tiled_attention.cpp`."""

    _fields_ = (
        *((name, c_void_p) for name in ("keys", "values")),
        *((name, c_int64) for name in ("head", "block_size", "K", "G", "D")),
    )


class _Segments(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("rows", "lengths", "starts", "tables")),
        ("count", c_int64),
        ("width", c_int64),
    )


class _Scores(Structure):
    _fields_ = (("scale", c_float), ("cap", c_float), ("sinks", c_void_p), ("window", c_int64))


class TiledSegments:
    """The segments of a micro-batch.

    Args:
        rows: the first row of each, and one past the last; int64.
        lengths: length of each, int64.
        starts: position of the first token of each, int64.
        tables: the KV blocks of each, [segments, blocks] int32.
    """

    def __init__(self, rows: np.ndarray, lengths: np.ndarray, starts: np.ndarray, tables: np.ndarray) -> None:
        self._arrays = (rows, lengths, starts, tables)  # `held` points into them
        self.held = _Segments(*(each.ctypes.data for each in self._arrays), *tables.shape)


def attend(
    q_TKGD: Tensor,
    keys_SKD: Tensor,
    values_SKD: Tensor,
    segments: TiledSegments,
    *,
    block_size: int,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Return the attention output of all rows, [T, K * G * D]. `softcap`: 0 for no capping; see `TiledBackend`."""
    K, G, D = q_TKGD.shape[1:]
    q_TKGD = q_TKGD.contiguous()
    out = torch.empty_like(q_TKGD)
    sinks = None if sinks is None else sinks.float().contiguous()
    assert keys_SKD.stride()[::2] == values_SKD.stride()[::2] == (D, 1)
    cache = _Cache(keys_SKD.data_ptr(), values_SKD.data_ptr(), keys_SKD.stride(1), block_size, K, G, D)
    scores = _Scores(D**-0.5, softcap, None if sinks is None else sinks.data_ptr(), window)
    library = find_tiled(_FILE)
    assert library is not None
    library.attend(byref(cache), byref(segments.held), byref(scores), q_TKGD.data_ptr(), out.data_ptr())
    return out.flatten(1)


def can_attend(dtype: torch.dtype, device: torch.device, *, head_dim: int, block_size: int) -> bool:
    """Return whether the processor has AMX, and the sizes are multiples of its tiles."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return False
    return head_dim % _NUMBERS == block_size % _KEYS == 0 and find_tiled(_FILE) is not None
