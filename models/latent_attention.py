"""MLA: multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

The cache contains one compressed KV vector c per token, shared by all heads, and the rotary part of the key. The
projections can be absorbed: a score q . (W_k c) is (W_k^T q) . c, and a sum of values W_v c is W_v times a sum of c. So
decodes attend to the compressed KV in the cache without expanding keys or values.
"""

from __future__ import annotations

from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.cache_rows import read_rows
from ..kernels.operators.base import rotate
from ..kernels.weight_format import WeightFormat
from ..parallel.layers import ReplicatedLinear
from .attention.latent import LatentBackend, LatentPlan
from .attention.sdpa import SegmentPlan
from .batch_context import BatchContext
from .layer_build import LayerBuild
from .norm import Norm

_NORM_EPS = 1e-6  # of the norms of compressed queries and KV, for all models


class LatentAttention(nn.Module):
    """MLA over this rank's N heads of E elements, the last R of them rotary. C: elements cached per token.

    Its parts are called separately, like those of `Attention`. `format` applies to the output projection.
    """

    def __init__(self, build: LayerBuild, backend: LatentBackend, format: WeightFormat | None = None) -> None:
        super().__init__()
        arch, groups = build.arch, build.groups
        assert arch.latent is not None
        self.latent = latent = arch.latent
        self.heads = arch.num_heads // groups.mesh.tp
        self.backend = backend
        self.query_rank = latent.query_rank or 0
        H, N = arch.hidden_size, arch.num_heads
        self.scale = latent.query_dim**-0.5 if arch.attention_scale is None else arch.attention_scale

        def norm(size: int) -> Norm:
            return Norm(size, _NORM_EPS, build.kernels, dtype=build.dtype, device=groups.device)

        width = self.query_rank + latent.cached
        self.down = ReplicatedLinear(H, width, bias=latent.down_bias, dtype=build.dtype, groups=groups)
        self.query_norm = norm(self.query_rank) if self.query_rank else None
        self.norm = norm(latent.rank)
        self.query = build.column(self.query_rank or H, N * latent.query_dim, bias=False)
        # These expand the compressed KV to keys and values.
        self.up_key = build.empty(self.heads, latent.head_dim, latent.rank)
        self.up_value = build.empty(self.heads, latent.value_dim, latent.rank)
        self.out = build.row(N * latent.value_dim, H, bias=arch.attention_out_bias, format=format)
        self.sinks = None

    def project(
        self, x_TH: Tensor, context: BatchContext, keys_S1C: Tensor, values_S1C: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """Write the compressed KV and rotated keys of all T tokens to the cache, and return the queries [T, N, E]."""
        assert out is None, "no CUDA graph holds it"
        assert context.rope is not None
        cos, sin = (each.squeeze(1) for each in context.rope)  # [T, 1, R / 2]
        latent = self.latent
        down = self.down(x_TH)
        cached = down.new_empty(len(down), 1, latent.cached)
        cached[:, 0, : latent.rank] = self.norm(down[:, self.query_rank : -latent.rotary_dim].contiguous())
        cached[..., latent.rank :] = rotate(down[:, None, -latent.rotary_dim :], cos, sin)
        keys_S1C.index_copy_(0, context.slots, cached)
        made_of = x_TH if self.query_norm is None else self.query_norm(down[:, : self.query_rank].contiguous())
        queries: Tensor = self.query(made_of).view(-1, self.heads, latent.query_dim)
        queries[..., latent.head_dim :] = rotate(queries[..., latent.head_dim :], cos, sin)
        return queries

    def attend(self, queries: Tensor, context: BatchContext, keys_S1C: Tensor, values_S1C: Tensor) -> Tensor:
        """Return the attention output of the queries [T, N, E], [T or len(context.rows), N * value_dim]."""
        if context.rows is not None:
            queries = queries[context.rows]
        plan: LatentPlan = context.plan
        out = queries.new_empty(len(queries), self.heads, self.latent.value_dim)
        for segment in plan.expanded:
            out[segment.rows] = self._expanded(queries[segment.rows], keys_S1C, segment)
        if plan.rest is not None:
            out[plan.rows] = self._absorbed(queries[plan.rows], keys_S1C, plan)
        return out.flatten(1)

    def _expanded(self, queries: Tensor, keys_S1C: Tensor, segment: SegmentPlan) -> Tensor:
        """Return the attention of one chunk, [rows, N, value_dim], with keys and values expanded."""
        latent = self.latent
        cached = read_rows(keys_S1C, segment.slots, latent.cached, queries.dtype)[:, 0]  # [context, C]
        rank, width = latent.rank, latent.head_dim
        keys = cached.new_empty(self.heads, len(cached), latent.query_dim)
        made = F.linear(cached[:, :rank], self.up_key.flatten(0, 1)).view(len(cached), self.heads, width)
        keys[..., :width] = made.transpose(0, 1)
        keys[..., width:] = cached[:, rank:]
        values = F.linear(cached[:, :rank], self.up_value.flatten(0, 1)).view(len(cached), self.heads, -1)
        attended = F.scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            keys[None],
            values.transpose(0, 1)[None],
            attn_mask=segment.mask,
            is_causal=segment.is_causal,
            scale=self.scale,
        )
        return attended[0].transpose(0, 1)

    def _absorbed(self, queries: Tensor, keys_S1C: Tensor, plan: LatentPlan) -> Tensor:
        """Return the attention of the plan's other rows, [rows, N, value_dim], with absorbed projections."""
        latent, rows = self.latent, len(queries)
        own = queries.new_empty(rows, self.heads, latent.cached)
        made_of = torch.bmm(queries[..., : latent.head_dim].transpose(0, 1), self.up_key)
        own[..., : latent.rank] = made_of.transpose(0, 1)
        own[..., latent.rank :] = queries[..., latent.head_dim :]
        own.mul_(self.scale * latent.cached**0.5)  # the backend divides by the root of its head's size
        # With fewer rows than threads, repeat the KV head, so that the backend parallelizes over heads too.
        threads = torch.get_num_threads() if own.device.type == "cpu" else 1
        parts = gcd(self.heads, threads) if rows < threads else 1
        shared = keys_S1C.expand(-1, parts, -1)
        attended = self.backend.attend(own.view(rows, parts, -1, latent.cached), shared, shared, plan.rest)
        attended = attended.view(rows, self.heads, latent.cached)[..., : latent.rank]
        return torch.bmm(attended.transpose(0, 1), self.up_value.transpose(1, 2)).transpose(0, 1)
