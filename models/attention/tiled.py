"""Paged attention in bfloat16 on a CPU with AMX: one C++ call for all chunks and decodes, reading pages in place."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
from torch import Tensor

from ...kernels.tiled_attention import TiledSegments, attend, can_attend
from ..batch import RaggedBatch, tables_of
from .backend import AttentionBackend, AttentionSizes


class TiledBackend(AttentionBackend):
    """Computes chunks and decodes in one call that reads keys and values in place.

    Args:
        softcap: scores s become softcap * tanh(s / softcap); None: no capping.
    """

    def __init__(self, sizes: AttentionSizes, softcap: float | None = None) -> None:
        super().__init__(sizes)
        self._window = sizes.window or np.iinfo(np.int32).max
        self._softcap = softcap or 0.0

    def plan(self, batch: RaggedBatch) -> TiledSegments:
        """Gather the rows, positions and block tables of all chunks and decodes."""
        chunks, decodes = tables_of(batch.chunks), batch.decodes.tables
        tables = np.zeros((len(chunks) + len(decodes), max(chunks.shape[1], decodes.shape[1])), dtype=np.int32)
        tables[: len(chunks), : chunks.shape[1]] = chunks
        tables[len(chunks) :, : decodes.shape[1]] = decodes
        lengths = np.array([chunk.length for chunk in batch.chunks] + [1] * len(decodes), dtype=np.int64)
        starts = np.concatenate([np.array([c.start for c in batch.chunks], dtype=np.int64), batch.decodes.starts])
        rows = np.array([0, *accumulate(lengths.tolist())], dtype=np.int64)
        return TiledSegments(rows, lengths, starts, tables)

    def attend(
        self, q_TKGD: Tensor, keys_SKD: Tensor, values_SKD: Tensor, plan: TiledSegments, sinks: Tensor | None = None
    ) -> Tensor:
        """See `AttentionBackend.attend`. `sinks`: per head, [K * G], an extra score in the softmax without a value."""
        return attend(
            q_TKGD,
            keys_SKD,
            values_SKD,
            plan,
            block_size=self.sizes.block_size,
            window=self._window,
            softcap=self._softcap,
            sinks=sinks,
        )


def runs(sizes: AttentionSizes) -> bool:
    """Return whether the processor has AMX, and the sizes are multiples of its tiles."""
    return can_attend(sizes.dtype, sizes.device, head_dim=sizes.head_dim, block_size=sizes.block_size)
