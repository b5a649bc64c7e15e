"""The norm, activation and rotary operators in Triton, for CUDA: one kernel each, versus two to eleven in torch.

The number of tokens is only the grid size, never an argument, so that each kernel is compiled once per model for any
micro-batch size. Compile-time constants are sizes of the model.

Kernels compute in float32 and round on write. A norm's sum with the residual is rounded before it is normalized.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cache_rows import CACHE_DTYPES
from ..head_norm import HeadNorm
from .base import Kernels

_GATE_BLOCK = 1024  # elements of a gate that one program computes


@triton.jit
def _add_and_norm(x, added, weight, bias, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * SIZE
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    values = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    if added is not None:
        values += tl.load(added + row + at, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(x.dtype.element_ty)
        tl.store(x + row + at, rounded, mask=inside)
        values = rounded.to(tl.float32)
    if bias is not None:
        values = tl.where(inside, values - tl.sum(values, axis=0) / SIZE, 0.0)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + eps)
    normed = values * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        normed += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + at, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated_silu(hidden, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * SIZE
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    gate = tl.load(hidden + 2 * row + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(hidden + 2 * row + SIZE + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + at, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _heads(source, query_weight, key_weight, eps, head, at, inside, G: tl.constexpr, D: tl.constexpr):
    """Load the elements `at` of queries and key, normalized if there are weights. `at` has each index of D once."""
    x = tl.load(source + head * D + at, mask=inside, other=0.0).to(tl.float32)
    if query_weight is not None:
        of_query = tl.load(query_weight + at, mask=inside & (head < G), other=0.0).to(tl.float32)
        of_key = tl.load(key_weight + at, mask=inside & (head == G), other=0.0).to(tl.float32)
        x *= tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None] * (of_query + of_key)
    return x


# Slots are at any offset of an upload: specializing on alignment would compile the kernel twice.
@triton.jit(do_not_specialize_on_alignment=["slots"])
def _rotate_and_write(
    qkv,
    query_weight,
    key_weight,
    eps,
    cos,
    sin,
    slots,
    keys,
    values,
    queries,
    G: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute one KV group of one token: G query heads and their key head, and the value."""
    token, group, K = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    head, at = tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (head <= G) & (at < D)
    source = qkv + (token * K + group) * (G + 2) * D
    x = _heads(source, query_weight, key_weight, eps, head, at, inside, G, D)
    if cos is not None:
        across = _heads(source, query_weight, key_weight, eps, head, (at + D // 2) % D, inside, G, D)
        angle = token * (D // 2) + at % (D // 2)
        across *= tl.load(sin + angle, mask=at < D, other=0.0).to(tl.float32)
        x = x * tl.load(cos + angle, mask=at < D, other=0.0).to(tl.float32) + tl.where(at < D // 2, -across, across)
    x = x.to(queries.dtype.element_ty)
    tl.store(queries + ((token * K + group) * G + head) * D + at, x, mask=inside & (head < G))
    slot = (tl.load(slots + token) * K + group) * D + at
    tl.store(keys + slot + head * 0, x, mask=inside & (head == G))
    tl.store(values + slot, tl.load(source + (G + 1) * D + at, mask=at < D, other=0.0), mask=at < D)


class TritonKernels(Kernels):
    """Launches the kernels on the current stream, for tensors of any floating type on CUDA.

    The KV cache must be laid out as [S, K, D].

    Raises:
        Exception: Triton does not run here. The first kernel launch fails without the device's driver or, for some
            versions, a C compiler.
    """

    def __init__(self, device: torch.device) -> None:
        self.gated_silu(torch.zeros(1, 2, device=device))

    def norm(self, x_TH: Tensor, term_TH: Tensor | None, weight_H: Tensor, bias_H: Tensor | None, eps: float) -> Tensor:
        """See `Kernels.norm`."""
        T, H = x_TH.shape
        out = torch.empty_like(x_TH)
        assert all(x is None or x.is_contiguous() for x in (x_TH, term_TH))
        block = _power_of_two(H)
        warps = min(16, max(4, block // 512))
        _add_and_norm[(T,)](x_TH, term_TH, weight_H, bias_H, out, eps, SIZE=H, BLOCK=block, num_warps=warps)
        return out

    def gated_silu(self, hidden_TF: Tensor) -> Tensor:
        """See `Kernels.gated_silu`."""
        T, width = hidden_TF.shape
        out = hidden_TF.new_empty(T, width // 2)
        assert hidden_TF.is_contiguous()
        grid = (T, -(-width // 2 // _GATE_BLOCK))
        _gated_silu[grid](hidden_TF, out, SIZE=width // 2, BLOCK=_GATE_BLOCK, num_warps=4)
        return out

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
        """See `Kernels.rotate_and_write`. An 8-bit cache is written by torch's operators."""
        if key_cache_SKD.dtype in CACHE_DTYPES.values():
            return super().rotate_and_write(
                qkv_TKED, head_norm, rope, slots_T, key_cache_SKD, value_cache_SKD, out_TKGD
            )
        T, K, E, D = qkv_TKED.shape
        queries = qkv_TKED.new_empty(T, K, E - 2, D) if out_TKGD is None else out_TKGD
        tensors = *(rope or (None, None)), slots_T, key_cache_SKD, value_cache_SKD, queries
        assert all(x is None or x.is_contiguous() for x in (qkv_TKED, *tensors))
        own = head_norm
        weights = (None, None, 0.0) if own is None else (own.query_weight, own.key_weight, own.eps)
        sizes = {"G": E - 2, "D": D, "HEADS": _power_of_two(E - 1), "BLOCK": _power_of_two(D)}
        _rotate_and_write[T, K](qkv_TKED, *weights, *tensors, **sizes, num_warps=4 if E * D > 512 else 1)
        return queries


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
