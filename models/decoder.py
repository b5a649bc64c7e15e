"""One decoder layer: attention and a feed-forward network, each behind a norm and added to the residual stream.

Linear layers compute all tokens of a micro-batch together; only attention treats chunks and decodes separately (paper
4.3.1). Queries, keys and values come from one matrix product. Its rows are interleaved by KV group as in Megatron: G
query heads, their key head, their value head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from ..conf.architecture import LayerKind
from ..parallel.layers import Parts, RowParallelLinear
from .attention.backend import AttentionBackend
from .attention.latent import LatentBackend
from .attention.scores import ScoresBackend
from .attention.tiled import TiledBackend
from .batch_context import BatchContext
from .experts.block import Experts
from .head_norm import HeadNorm, WidthNorm
from .latent_attention import LatentAttention
from .layer_build import LayerBuild
from .layout import norm_places
from .quantization.formats import LayerFormats


class Attention(nn.Module):
    """Self-attention over this rank's heads: K KV heads with G query heads each.

    A layer calls its parts one by one, `project`, `attend` and `out`: CUDA graphs hold what lies between two layers'
    attention.
    """

    def __init__(self, build: LayerBuild, backend: AttentionBackend, formats: LayerFormats) -> None:
        super().__init__()
        arch, tp, H, D = build.arch, build.groups.mesh.tp, build.arch.hidden_size, build.arch.head_dim
        N, K = arch.num_heads, arch.num_kv_heads
        self.backend = backend
        self.kernels = build.kernels
        self.shape = (-1, K // tp, N // K + 2, D)
        self.qkv = build.column(H, (N + 2 * K) * D, bias=arch.qkv_bias, format=formats.qkv)
        self.out = build.row(N * D, H, bias=arch.attention_out_bias, format=formats.out)
        self.qk_norm: HeadNorm | WidthNorm | None = None
        if arch.qk_norm:
            self.qk_norm = WidthNorm(arch, build.groups, dtype=build.dtype)
            if arch.qk_norm_over == "head":
                self.qk_norm = HeadNorm(D, arch.norm_eps, dtype=build.dtype, device=build.groups.device)
        self.sinks = build.empty(N // tp) if arch.attention_sinks else None
        self.query_factor = 1.0 if arch.attention_scale is None else arch.attention_scale * D**0.5
        self.factor = arch.residual_scale

    def project(
        self, x_TH: Tensor, context: BatchContext, keys_SKD: Tensor, values_SKD: Tensor, out_TKGD: Tensor | None = None
    ) -> Tensor:
        """Write keys and values of all T tokens to the cache, and return the queries [T, K, G, D], in `out_TKGD`."""
        qkv = self.qkv(x_TH).view(self.shape)
        head_norm = self.qk_norm
        if isinstance(head_norm, WidthNorm):
            head_norm = head_norm(qkv)
        queries = self.kernels.rotate_and_write(
            qkv, head_norm, context.rope, context.slots, keys_SKD, values_SKD, out_TKGD
        )
        return queries if self.query_factor == 1.0 else queries.mul_(self.query_factor)

    def attend(self, queries: Tensor, context: BatchContext, keys_SKD: Tensor, values_SKD: Tensor) -> Tensor:
        """Return what the queries [T, K, G, D] attend to, [T or R, K * G * D]."""
        if context.rows is not None:
            queries = queries[context.rows]
        if self.sinks is None:
            out = self.backend.attend(queries, keys_SKD, values_SKD, context.plan)
        else:
            assert isinstance(self.backend, ScoresBackend | TiledBackend)
            out = self.backend.attend(queries, keys_SKD, values_SKD, context.plan, self.sinks)
        return out if self.factor == 1.0 else out.mul_(self.factor)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square_(),
}


class FeedForward(nn.Module):
    """The feed-forward network fc2(act(fc1(x))), plus a residual. Maps [T, H] to [T, H].

    Its inner width is `size`; None: the model's.

    Where it is gated, it is fc2(act(gate(x)) * up(x)), and fc1 holds this rank's rows [gate; up].
    """

    def __init__(self, build: LayerBuild, formats: LayerFormats, size: int | None = None) -> None:
        super().__init__()
        arch = build.arch
        size, H, bias = size or arch.ffn_size, arch.hidden_size, arch.ffn_bias
        self.size, self.tp = size, build.groups.mesh.tp
        self.kernels = build.kernels
        self.gated = arch.gated_ffn
        self.activation = _ACTIVATIONS[arch.activation]
        self.factor = arch.residual_scale
        self.fc1 = build.column(H, size * (2 if self.gated else 1), bias=bias, format=formats.fc1)
        self.fc2 = build.row(size, H, bias=bias, format=formats.fc2)

    def forward(self, x_TH: Tensor, residual: Tensor) -> Parts:
        """Return `residual` + fc2(act(fc1(x))), [T, H]."""
        out: Parts = self.fc2(self._hidden(x_TH), residual)
        return out

    def product(self, x_TH: Tensor) -> Tensor:
        """Return fc2(act(fc1(x))), [T, H]."""
        return self.fc2.product(self._hidden(x_TH))

    def partial(self, x_TH: Tensor) -> Tensor:
        """Return this rank's part of fc2(act(fc1(x))), [T, H]."""
        return self.fc2.partial(self._hidden(x_TH))

    def _hidden(self, x_TH: Tensor) -> Tensor:
        if self.gated and self.activation is F.silu:
            fused = self.fc1.gated_silu(x_TH)
            hidden = self.kernels.gated_silu(self.fc1(x_TH)) if fused is None else fused
        elif self.gated:
            gate, up = self.fc1(x_TH).chunk(2, dim=-1)
            hidden = self.activation(gate).mul_(up)
        else:
            hidden = self.activation(self.fc1(x_TH))
        return hidden if self.factor == 1.0 else hidden.mul_(self.factor)


def _sum(x_TH: Parts) -> Tensor:
    """Return the sum of both parts, which is written to the first."""
    return x_TH[0] if x_TH[1] is None else x_TH[0].add_(x_TH[1])


class DecoderLayer(nn.Module):
    """One decoder layer. Maps [T, H] to [T, H], or to [R, H] of `context.rows`, and writes to its input.

    `arch.norms` says which of the norms there are, and `kind` whether it has experts: whole ones on each rank where
    `whole_experts`, else a slice of each.
    """

    def __init__(
        self,
        build: LayerBuild,
        kind: LayerKind,
        backend: AttentionBackend,
        formats: LayerFormats,
        *,
        whole_experts: bool = False,
    ) -> None:
        super().__init__()
        arch, places = build.arch, norm_places(build.arch)

        def norm(place: str) -> nn.Module | None:
            return build.norm() if place in places else None

        self.is_parallel = arch.norms in ("parallel", "shared")
        self.attention_norm = norm("attention_norm")
        self.attention: Attention | LatentAttention
        if isinstance(backend, LatentBackend):
            self.attention = LatentAttention(build, backend, formats.out)
        else:
            self.attention = Attention(build, backend, formats)
        self.attention_norm_after = norm("attention_norm_after")
        self.ffn_norm = norm("ffn_norm")
        self.ffn_norm_after = norm("ffn_norm_after")
        self.ffn: FeedForward | Experts
        if arch.experts is None or not kind.experts:
            self.ffn = FeedForward(build, formats)
        else:
            size, dtype = arch.experts.shared_ffn_size, build.dtype
            shared = FeedForward(build, formats.shared, size) if size else None
            self.ffn = Experts(arch, build.groups, shared, whole=whole_experts, dtype=dtype, formats=formats.experts)

    def forward(self, x_TH: Parts, context: BatchContext, keys_SKD: Tensor, values_SKD: Tensor) -> Parts:
        """Compute the layer for `context.rows` (None: all); write the keys and values of all tokens to the cache."""
        queries = self.before_attention(x_TH, context, keys_SKD, values_SKD)
        residual = x_TH[0] if context.rows is None else x_TH[0][context.rows]
        if context.is_empty:
            return residual, None
        return self.after_attention(self.attention.attend(queries, context, keys_SKD, values_SKD), residual)

    def before_attention(
        self, x_TH: Parts, context: BatchContext, keys_SKD: Tensor, values_SKD: Tensor, out_TKGD: Tensor | None = None
    ) -> Tensor:
        """Make x one part in place, write keys and values to the cache, and return the queries [T, K, G, D]."""
        normed = _sum(x_TH) if self.attention_norm is None else self.attention_norm(*x_TH)
        return self.attention.project(normed, context, keys_SKD, values_SKD, out_TKGD)

    def after_attention(self, attended: Tensor, residual: Tensor) -> Parts:
        """Return the layer's output of the same rows. The residual is what `before_attention` left of x."""
        if self.is_parallel:
            norm = self.attention_norm if self.ffn_norm is None else self.ffn_norm
            assert norm is not None
            return self._add(self.attention.out, attended, None, _sum(self.ffn(norm(residual), residual)))
        x = self._add(self.attention.out, attended, self.attention_norm_after, residual)
        normed = _sum(x) if self.ffn_norm is None else self.ffn_norm(*x)
        return self._add(self.ffn, normed, self.ffn_norm_after, x[0])

    @staticmethod
    def _add(
        block: RowParallelLinear | FeedForward | Experts, x: Tensor, norm_after: nn.Module | None, residual: Tensor
    ) -> Parts:
        """Return `residual` plus what the block makes of x, normed where there is a norm after it."""
        if norm_after is not None:
            return residual, norm_after(block.product(x))
        out: Parts = block(x, residual)
        return out
