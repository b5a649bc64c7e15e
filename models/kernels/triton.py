"""The small operators in Triton, for CUDA: each is one kernel where torch launches two to eight.

The number of tokens is the size of a kernel's grid and never an argument, so that each kernel is compiled once for a
model, whatever the sizes of its micro-batches. What the compiler takes as constants are sizes of the model.

Kernels compute in float32 and round where torch does, but for the products within a rotation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

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
    activated = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row + at, (activated * up).to(out.dtype.element_ty), mask=inside)


# Slots lie at any place of an upload, so that their address is now and then a multiple of 16.
@triton.jit(do_not_specialize_on_alignment=["slots"])
def _rotate_and_write(
    qk,
    values,
    cos,
    sin,
    slots,
    keys,
    value_cache,
    queries,
    QK_TOKEN: tl.constexpr,
    QK_GROUP: tl.constexpr,
    VALUES_TOKEN: tl.constexpr,
    VALUES_GROUP: tl.constexpr,
    SLOT: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute one KV group of one token: G query heads and their key head, and the value."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, at = tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (head <= G) & (at < D)
    source = qk + token * QK_TOKEN + group * QK_GROUP + head * D
    x = tl.load(source + at, mask=inside, other=0.0)
    if cos is not None:
        angle = token * (D // 2) + at % (D // 2)
        partner = tl.load(source + (at + D // 2) % D, mask=inside, other=0.0).to(tl.float32)
        across = partner * tl.load(sin + angle, mask=at < D, other=0.0).to(tl.float32)
        along = x.to(tl.float32) * tl.load(cos + angle, mask=at < D, other=0.0).to(tl.float32)
        x = (along + tl.where(at < D // 2, -across, across)).to(queries.dtype.element_ty)
    tl.store(queries + (token * tl.num_programs(1) + group) * G * D + head * D + at, x, mask=inside & (head < G))
    slot = tl.load(slots + token) * SLOT + group * D + at
    tl.store(keys + slot + head * 0, x, mask=inside & (head == G))
    value = tl.load(values + token * VALUES_TOKEN + group * VALUES_GROUP + at, mask=at < D, other=0.0)
    tl.store(value_cache + slot, value, mask=at < D)


class TritonKernels:
    """Launches the kernels on the current stream. A `Kernels` for tensors of any floating type on CUDA.

    The KV cache must be laid out as [S, K, D].

    Raises:
        Exception: Triton does not run here. It says so when a kernel is first launched: it needs the device's driver
            and, for some versions, a C compiler.
    """

    no_cpp = ""

    def __init__(self, device: torch.device) -> None:
        self.gated_silu(torch.zeros(1, 2, device=device))

    def norm(
        self,
        x_TH: torch.Tensor,
        added_TH: torch.Tensor | None,
        weight_H: torch.Tensor,
        bias_H: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """See `Kernels.norm`."""
        T, H = x_TH.shape
        out = torch.empty_like(x_TH)
        assert x_TH.is_contiguous()
        assert added_TH is None or added_TH.is_contiguous()
        block = _power_of_two(H)
        warps = min(16, max(4, block // 512))
        _add_and_norm[(T,)](x_TH, added_TH, weight_H, bias_H, out, eps, SIZE=H, BLOCK=block, num_warps=warps)
        return out

    def gated_silu(self, hidden_TF: torch.Tensor) -> torch.Tensor:
        """See `Kernels.gated_silu`."""
        T, width = hidden_TF.shape
        out = hidden_TF.new_empty(T, width // 2)
        assert hidden_TF.is_contiguous()
        grid = (T, -(-width // 2 // _GATE_BLOCK))
        _gated_silu[grid](hidden_TF, out, SIZE=width // 2, BLOCK=_GATE_BLOCK, num_warps=4)
        return out

    def rotate_and_write(
        self,
        qk_TKED: torch.Tensor,
        values_TKD: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor] | None,
        slots_T: torch.Tensor,
        key_cache_SKD: torch.Tensor,
        value_cache_SKD: torch.Tensor,
        out_TKGD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Kernels.rotate_and_write`."""
        T, K, E, D = qk_TKED.shape
        queries = qk_TKED.new_empty(T, K, E - 1, D) if out_TKGD is None else out_TKGD
        assert qk_TKED.stride()[2:] == (D, 1)
        assert values_TKD.stride(2) == 1
        assert queries.is_contiguous()
        assert key_cache_SKD.stride() == value_cache_SKD.stride() == (K * D, D, 1)
        cos, sin = (None, None) if rope is None else rope
        _rotate_and_write[T, K](
            qk_TKED,
            values_TKD,
            cos,
            sin,
            slots_T,
            key_cache_SKD,
            value_cache_SKD,
            queries,
            *qk_TKED.stride()[:2],
            *values_TKD.stride()[:2],
            K * D,
            G=E - 1,
            D=D,
            HEADS=_power_of_two(E),
            BLOCK=_power_of_two(D),
            num_warps=4 if E * D > 512 else 1,
        )
        return queries


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
