"""A layer's norm, activation and rotary operators: the interface and its torch implementation for any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cache_rows import write_rows
from ..head_norm import HeadNorm


class Kernels:
    """The operators of a layer other than GEMM and attention, by torch.

    Sizes: T tokens, H hidden size, F feed-forward size, K KV heads with G query heads each, D head dimension, S slots
    of the KV cache.

    `fallback_reason` is why torch's operators replace faster ones for this device: C++ on a CPU, Triton on CUDA. Empty:
    no fallback.
    """

    fallback_reason = ""

    def norm(self, x_TH: Tensor, term_TH: Tensor | None, weight_H: Tensor, bias_H: Tensor | None, eps: float) -> Tensor:
        """Add `term_TH` to x, in place, and return the norm of the sum, [T, H].

        It is x / rms(x) * weight (RMSNorm), and with a bias (x - mean(x)) / std(x) * weight + bias (LayerNorm).
        """
        if term_TH is not None:
            x_TH.add_(term_TH)
        if bias_H is None:
            return F.rms_norm(x_TH, weight_H.shape, weight_H, eps)
        return F.layer_norm(x_TH, weight_H.shape, weight_H, bias_H, eps)

    def gated_silu(self, hidden_TF: Tensor) -> Tensor:
        """Return silu(gate) * up, [T, F], of [gate; up], [T, 2 F]. May write to its input."""
        gate, up = hidden_TF.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def rotate_and_write(
        self,
        qkv_TKED: Tensor,
        head_norm: HeadNorm | None,
        rope: tuple[Tensor, Tensor] | None,
        slots_T: Tensor,
        key_cache_SKD: Tensor,
        value_cache_SKD: Tensor,
        out_TKGD: Tensor | None = None,
    ) -> Tensor:
        """Rotate queries and keys by position, and write keys and values to their slots of the cache.

        Args:
            qkv_TKED: Per KV group, G queries, their key and their value: E = G + 2.
            head_norm: Normalizes queries and keys first; None: no normalization.
            rope: Cosines and sines, each [T, 1, 1, D / 2]; None: no rotation.
            slots_T: The slot of each token in the cache.
            key_cache_SKD: Keys of all slots, to write to.
            value_cache_SKD: Values of all slots, to write to.
            out_TKGD: Where to write the queries; None: a new tensor or a view of `qkv_TKED`.

        Returns:
            The queries, [T, K, G, D].
        """
        qk_TKED = qkv_TKED[:, :, :-1] if head_norm is None else head_norm(qkv_TKED[:, :, :-1])
        if rope is not None:
            qk_TKED = rotate(qk_TKED, *rope)
        write_rows(key_cache_SKD, slots_T, qk_TKED[:, :, -1])
        write_rows(value_cache_SKD, slots_T, qkv_TKED[:, :, -1])
        queries = qk_TKED[:, :, :-1]
        return queries if out_TKGD is None else out_TKGD.copy_(queries)


class TorchKernels(Kernels):
    """Calls only torch's operators."""

    def __init__(self, fallback_reason: str = "") -> None:
        self.fallback_reason = fallback_reason


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [T, ..., D] by position. Element i of a head pairs with element i + D / 2."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    a, b = x.chunk(2, dim=-1)
    out_a, out_b = out.chunk(2, dim=-1)
    torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=out_b).addcmul_(a, sin)
    return out
