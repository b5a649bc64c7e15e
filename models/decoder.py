"""One decoder layer: attention and a feed-forward network, each behind a norm and added to the residual stream.

Linear layers compute all tokens of a micro-batch together; only attention treats chunks and decodes separately (paper
4.3.1). Queries, keys and values come from one GEMM. Its rows are interleaved by KV group as in Megatron: G query heads,
their key head, their value head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from ..conf.architecture import LayerKind
from ..kernels.head_norm import HeadNorm
from ..parallel.layers import Parts, RowParallelLinear
from .attention.backend import AttentionBackend
from .attention.latent import LatentBackend
from .attention.scores import ScoresBackend
from .attention.tiled import TiledBackend
from .batch_context import BatchContext
from .experts.block import Experts
from .latent_attention import LatentAttention
from .layer_build import LayerBuild
from .layout import norm_places
from .quantization.formats import LayerFormats
from .width_norm import WidthNorm


class Attention(nn.Module):
    """Self-attention over this rank's heads: K KV heads with G query heads each.

    A layer calls `project`, `attend` and `out` separately, since piecewise CUDA graphs are split at attention.
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
        """Write keys and values of all T tokens to the cache. Returns queries [T, K, G, D], in `out_TKGD` if given."""
        qkv = self.qkv(x_TH).view(self.shape)
        head_norm = self.qk_norm
        if isinstance(head_norm, WidthNorm):
            head_norm = head_norm(qkv)
        queries = self.kernels.rotate_and_write(
            qkv, head_norm, context.rope, context.slots, keys_SKD, values_SKD, out_TKGD
        )
        return queries if self.query_factor == 1.0 else queries.mul_(self.query_factor)

    def attend(self, queries: Tensor, context: BatchContext, keys_SKD: Tensor, values_SKD: Tensor) -> Tensor:
        """Return the attention output of the queries [T, K, G, D], [T or R, K * G * D]."""
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

    A gated network is fc2(act(gate(x)) * up(x)); fc1 contains this rank's rows [gate; up].
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
        """Return this rank's partial fc2(act(fc1(x))), before the all-reduce, [T, H]."""
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


def _sum(residual_TH: Tensor, hidden_TH: Tensor | None) -> Tensor:
    """Add the hidden state to the residual in place, and return it."""
    return residual_TH if hidden_TH is None else residual_TH.add_(hidden_TH)


class DecoderLayer(nn.Module):
    """One decoder layer. Maps (residual, hidden), each [T, H], to the same, or to [R, H] of `context.rows`.

    Modifies its input: both are summed in place.

    `arch.norms` determines its norms, and `kind` whether it has experts. With `whole_experts` each rank has some whole
    experts, otherwise a shard of every expert.
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

    def forward(
        self,
        residual_TH: Tensor,
        hidden_TH: Tensor | None,
        context: BatchContext,
        keys_SKD: Tensor,
        values_SKD: Tensor,
    ) -> Parts:
        """Compute the layer for `context.rows` (None: all); write the keys and values of all tokens to the cache."""
        queries = self.before_attention(residual_TH, hidden_TH, context, keys_SKD, values_SKD)
        if context.rows is not None:
            residual_TH = residual_TH[context.rows]
        if context.is_empty:
            return residual_TH, None
        return self.after_attention(self.attention.attend(queries, context, keys_SKD, values_SKD), residual_TH)

    def before_attention(
        self,
        residual_TH: Tensor,
        hidden_TH: Tensor | None,
        context: BatchContext,
        keys_SKD: Tensor,
        values_SKD: Tensor,
        out_TKGD: Tensor | None = None,
    ) -> Tensor:
        """Add hidden to residual in place, write keys and values to the cache, and return the queries [T, K, G, D]."""
        norm = _sum if self.attention_norm is None else self.attention_norm
        return self.attention.project(norm(residual_TH, hidden_TH), context, keys_SKD, values_SKD, out_TKGD)

    def after_attention(self, attended: Tensor, residual: Tensor) -> Parts:
        """Return the layer's output for the same rows. The residual is that which `before_attention` has added to."""
        if self.is_parallel:
            norm = self.attention_norm if self.ffn_norm is None else self.ffn_norm
            assert norm is not None
            return self._add(self.attention.out, attended, None, _sum(*self.ffn(norm(residual), residual)))
        residual, hidden = self._add(self.attention.out, attended, self.attention_norm_after, residual)
        normed = _sum(residual, hidden) if self.ffn_norm is None else self.ffn_norm(residual, hidden)
        return self._add(self.ffn, normed, self.ffn_norm_after, residual)

    @staticmethod
    def _add(
        block: RowParallelLinear | FeedForward | Experts, x: Tensor, norm_after: nn.Module | None, residual: Tensor
    ) -> Parts:
        """Return `residual` + block(x), with `norm_after` applied to the block's output if there is one."""
        if norm_after is not None:
            return residual, norm_after(block.product(x))
        out: Parts = block(x, residual)
        return out
