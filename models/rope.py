"""Rotary position embedding, with the linear and the LLaMA-3 scaling of its frequencies.

Sources: RoFormer (arXiv 2104.09864) for the rotation, in the half-split layout of the published LLaMA checkpoints;
position interpolation (arXiv 2306.15595) for `linear`; the LLaMA 3.1 model card for `llama3`; llama.cpp's
`rope_freqs` for `factors`.
"""

from __future__ import annotations

import math

import torch

from ..conf.schema import Architecture, RopeScaling


def inverse_frequencies(arch: Architecture) -> torch.Tensor:
    """Return the angle, in radians, by which each pair of elements turns per position: [D / 2] float32."""
    exponents = torch.arange(0, arch.head_dim, 2, dtype=torch.int64).float() / arch.head_dim
    frequencies = 1.0 / (arch.rope_theta**exponents)
    if arch.rope_scaling is None:
        return frequencies
    if arch.rope_scaling.type == "linear":
        return frequencies / arch.rope_scaling.factor
    if arch.rope_scaling.type == "factors":
        return frequencies / torch.tensor(arch.rope_scaling.factors)
    return _llama3(frequencies, arch.rope_scaling)


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Divide low frequencies by `factor`, keep high ones, and blend those between."""
    waves_in_context = scaling.original_max_position * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((waves_in_context - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


_FIRST_POSITIONS = 2048  # of the table, which doubles


class RotaryEmbedding:
    """Looks up the cosines and sines of a micro-batch's positions, once for all layers."""

    def __init__(self, arch: Architecture, *, dtype: torch.dtype, device: torch.device) -> None:
        self.frequencies = inverse_frequencies(arch).to(device)
        self.dtype = dtype
        self._table = self._compute(_FIRST_POSITIONS)

    def at(self, positions_T: torch.Tensor, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, each [T, 1, 1, D / 2], of positions below `end`."""
        if end > len(self._table[0]):
            self._table = self._compute(1 << (end - 1).bit_length())
        cos, sin = self._table
        return cos.index_select(0, positions_T), sin.index_select(0, positions_T)

    def _compute(self, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(end, device=self.frequencies.device, dtype=torch.float32)
        angles = (positions[:, None] * self.frequencies)[:, None, None]
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [T, ..., D] by position. Element i of a head pairs with element i + D / 2."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    a, b = x.chunk(2, dim=-1)
    out_a, out_b = out.chunk(2, dim=-1)
    torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=out_b).addcmul_(a, sin)
    return out
