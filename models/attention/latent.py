"""Plans multi-head latent attention: which chunks attend to latents, and which to keys and values made of them."""

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

    expanded: list[SegmentPlan]  # chunks whose keys and values are made of their latents
    rest: Any  # the plan of all other rows, which attend to latents; None: there are none
    rows: slice | Tensor  # which these are


def expands(latent: LatentConfig, chunk: Segment) -> bool:
    """Return whether a chunk takes fewer products if keys and values are made of the latents of its context.

    Otherwise its queries are turned into ones of latents, and what they attend to into values. The counts are those of
    one head.
    """
    n, context = chunk.length, chunk.context
    matrix = latent.rank * (latent.head_dim + latent.value_dim)
    expanded = context * matrix + n * context * (latent.query_dim + latent.value_dim)
    absorbed = n * matrix + n * context * 2 * latent.cached
    return expanded < absorbed or (expanded == absorbed and n > 1)


class LatentBackend(AttentionBackend):
    """Has `inner` attend to latents: they are keys and values of one KV head, whose queries are those of all heads.

    Args:
        inner: of one KV head, of the latent and the rotated key.
        latent: the model's sizes.
        sdpa: plans the chunks that are expanded.
    """

    def __init__(self, inner: AttentionBackend, latent: LatentConfig, sdpa: SdpaBackend) -> None:
        super().__init__(sdpa.sizes)
        self.about = inner.about
        self.inner = inner
        self.latent = latent
        self.sdpa = sdpa

    def plan(self, batch: RaggedBatch) -> LatentPlan:
        """Plan the chunks that are expanded apart from all other rows."""
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
        """Compute the attention of a plan's `rest`, as `inner` does."""
        return self.inner.attend(q_TKGD, keys_SKD, values_SKD, plan)
