"""Plans MLA (multi-head latent attention): which chunks expand the compressed KV, and which absorb the projections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from ...conf.latent import LatentConfig
from ..batch import RaggedBatch, Segment
from ..transfers import upload
from .backend import AttentionBackend
from .sdpa import SdpaBackend, SegmentPlan


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """The plan for the attention of a micro-batch."""

    expanded: list[SegmentPlan]  # chunks whose compressed KV is expanded to keys and values
    rest: Any  # the plan of all other rows, which attend to the compressed KV; None: there are none
    rows: slice | Tensor  # the rows of `rest`


def expands(latent: LatentConfig, chunk: Segment) -> bool:
    """Return whether a chunk takes fewer multiplications if the compressed KV of its context is expanded.

    Otherwise the projections are absorbed: queries are projected to the latent dimension, and the attention output is
    projected to values. Multiplications are counted per head.
    """
    n, context = chunk.length, chunk.context
    matrix = latent.rank * (latent.head_dim + latent.value_dim)
    expanded = context * matrix + n * context * (latent.query_dim + latent.value_dim)
    absorbed = n * matrix + n * context * 2 * latent.cached
    return expanded < absorbed or (expanded == absorbed and n > 1)


class LatentBackend(AttentionBackend):
    """Runs absorbed MLA through `inner`: the compressed KV is the keys and values of one KV head, as in MQA.

    Args:
        inner: a backend for one KV head of compressed KV and rotated key.
        latent: the model's MLA sizes.
        sdpa: plans the expanded chunks.
    """

    def __init__(self, inner: AttentionBackend, latent: LatentConfig, sdpa: SdpaBackend) -> None:
        super().__init__(sdpa.sizes)
        self.about = inner.about
        self.inner = inner
        self.latent = latent
        self.sdpa = sdpa

    def plan(self, batch: RaggedBatch) -> LatentPlan:
        """Plan the expanded chunks separately from all other rows."""
        expanded, kept, rows, row = [], [], [], batch.num_chunk_tokens
        for chunk, own_rows in zip(batch.chunks, batch.chunk_rows, strict=True):
            if expands(self.latent, chunk):
                expanded.append(self.sdpa.plan_chunk(chunk, own_rows))
            else:
                kept.append(chunk)
                rows.append(np.arange(own_rows.start, own_rows.stop))
        if not expanded:
            return LatentPlan([], self.inner.plan(batch), slice(0, batch.num_tokens))
        if not kept and not len(batch.decodes):
            return LatentPlan(expanded, None, slice(0, 0))
        own = np.concatenate([*rows, np.arange(row, batch.num_tokens)])
        rest = RaggedBatch(batch.token_ids[own], kept, batch.decodes, np.arange(0))
        where = upload([own], self.sizes.device)[0] if kept else slice(row, batch.num_tokens)
        return LatentPlan(expanded, self.inner.plan(rest), where)

    def attend(self, q_TKGD: Tensor, keys_SKD: Tensor, values_SKD: Tensor, plan: Any) -> Tensor:
        """Compute the attention of a plan's `rest` through `inner`."""
        return self.inner.attend(q_TKGD, keys_SKD, values_SKD, plan)
