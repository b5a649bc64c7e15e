"""Attention of bfloat16 on a CPU with AMX: one C++ call for all chunks and decodes, over the pages as they lie."""

from __future__ import annotations

from ctypes import CDLL, Structure, byref, c_float, c_int64, c_void_p
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from ...kernels.cpp_library import find_tiled
from ..batch import RaggedBatch, tables_of
from .backend import AttentionBackend, AttentionSizes

_KEYS, _NUMBERS = 16, 32  # of a tile: blocks and heads have a multiple of them


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


@dataclass(frozen=True, slots=True)
class TiledPlan:
    """The plan for the attention of a micro-batch: its chunks and decodes, and the arrays that they lie in."""

    segments: _Segments
    arrays: tuple[np.ndarray, ...]


class TiledBackend(AttentionBackend):
    """Reads keys and values in place, of chunks and decodes in one call.

    Args:
        softcap: scores s become softcap * tanh(s / softcap); None: they stay.
    """

    def __init__(self, sizes: AttentionSizes, softcap: float | None = None) -> None:
        super().__init__(sizes)
        self._window = sizes.window or np.iinfo(np.int32).max
        self._softcap = softcap or 0.0
        library = _library()
        assert library is not None
        self._attend = library.attend

    def plan(self, batch: RaggedBatch) -> TiledPlan:
        """Gather where the rows, positions and blocks of each chunk and decode are."""
        chunks, decodes = tables_of(batch.chunks), batch.decodes.tables
        tables = np.zeros((len(chunks) + len(decodes), max(chunks.shape[1], decodes.shape[1])), dtype=np.int32)
        tables[: len(chunks), : chunks.shape[1]] = chunks
        tables[len(chunks) :, : decodes.shape[1]] = decodes
        lengths = np.array([chunk.length for chunk in batch.chunks] + [1] * len(decodes), dtype=np.int64)
        starts = np.concatenate([np.array([c.start for c in batch.chunks], dtype=np.int64), batch.decodes.starts])
        rows = np.array([0, *accumulate(lengths.tolist())], dtype=np.int64)
        arrays = (rows, lengths, starts, tables)
        return TiledPlan(_Segments(*(each.ctypes.data for each in arrays), *tables.shape), arrays)

    def attend(
        self, q_TKGD: Tensor, keys_SKD: Tensor, values_SKD: Tensor, plan: TiledPlan, sinks: Tensor | None = None
    ) -> Tensor:
        """See `AttentionBackend.attend`. `sinks`: of each of the K * G heads, a score that takes a share."""
        K, G, D = q_TKGD.shape[1:]
        q_TKGD = q_TKGD.contiguous()
        out = torch.empty_like(q_TKGD)
        sinks = None if sinks is None else sinks.float().contiguous()
        assert keys_SKD.stride()[::2] == values_SKD.stride()[::2] == (D, 1)
        cache = _Cache(keys_SKD.data_ptr(), values_SKD.data_ptr(), keys_SKD.stride(1), self.sizes.block_size, K, G, D)
        scores = _Scores(D**-0.5, self._softcap, None if sinks is None else sinks.data_ptr(), self._window)
        self._attend(byref(cache), byref(plan.segments), byref(scores), q_TKGD.data_ptr(), out.data_ptr())
        return out.flatten(1)


def runs(sizes: AttentionSizes) -> bool:
    """Return whether the processor has tiles, and these sizes fill them."""
    if sizes.device.type != "cpu" or sizes.dtype != torch.bfloat16:
        return False
    return sizes.head_dim % _NUMBERS == sizes.block_size % _KEYS == 0 and _library() is not None


def _library() -> CDLL | None:
    return find_tiled("tiled_attention", attend="ppppp")
