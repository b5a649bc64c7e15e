"""Rotary position embedding, with the linear, LLaMA-3, YaRN and LongRoPE scaling of its frequencies.

Sources: RoFormer (arXiv 2104.09864) for the rotation, in the half-split layout of the published LLaMA checkpoints;
position interpolation (arXiv 2306.15595) for `linear`; the LLaMA 3.1 model card for `llama3`; YaRN (arXiv
2309.00071) and LongRoPE (arXiv 2402.13753), as transformers computes them; llama.cpp's `rope_freqs` for `factors`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..conf.architecture import Architecture, LayerKind, RopeScaling


def inverse_frequencies(kind: LayerKind, turned: int, max_position: int = 1) -> Tensor:
    """Return the rotation of each pair of `turned` elements in radians per position, [turned / 2] float32.

    `max_position` selects the short or long factors of longrope.
    """
    exponents = torch.arange(0, turned, 2, dtype=torch.int64).float() / turned
    frequencies, scaling = 1.0 / (kind.rope_theta**exponents), kind.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.type == "linear":
        return frequencies / scaling.factor
    if scaling.type in ("factors", "longrope"):
        is_short = scaling.type == "longrope" and max_position <= scaling.original_max_position
        return frequencies / torch.tensor(scaling.short_factors if is_short else scaling.factors)
    if scaling.type == "yarn":
        return _yarn(kind.rope_theta, turned, scaling)
    return _llama3(frequencies, scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide low frequencies by `factor`, keep high ones, and interpolate in between."""
    waves_in_context = scaling.original_max_position * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((waves_in_context - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _yarn(base: float, D: int, scaling: RopeScaling) -> Tensor:
    """Divide frequencies with few rotations in the training context by `factor`, with a linear ramp to the others."""

    def element(turns: float) -> float:
        """Return the fractional index of the frequency that makes `turns` rotations in the training context."""
        return D * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = element(scaling.beta_fast), element(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, D - 1)
    width = high - low or 0.001
    kept = 1 - ((torch.arange(D // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    periods = base ** (torch.arange(0, D, 2).float() / D)
    return 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept


_FIRST_POSITIONS = 2048  # initial table size; doubled as needed


class RotaryEmbedding:
    """Looks up the cosines and sines of a micro-batch's positions, once for all layers of a kind.

    With partial rotary embedding, unrotated pairs come last (`turning_order` of `models/weights.py`), with an angle of
    0.
    """

    def __init__(self, arch: Architecture, kind: LayerKind, *, dtype: torch.dtype, device: torch.device) -> None:
        turned = inverse_frequencies(kind, arch.turned, arch.max_position)
        still = 0 if arch.latent is not None else arch.head_dim // 2 - len(turned)
        self.frequencies = torch.cat([turned, torch.zeros(still)]).to(device)
        scale = 1.0 if kind.rope_scaling is None else kind.rope_scaling.attention_factor
        self._scale = torch.ones_like(self.frequencies)
        self._scale[: len(turned)] = scale
        self.dtype = dtype
        self._table = self._compute(_FIRST_POSITIONS)

    def at(self, positions_T: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, each [T, 1, 1, D / 2], of positions below `end`."""
        if end > len(self._table[0]):
            self._table = self._compute(1 << (end - 1).bit_length())
        cos, sin = self._table
        return cos.index_select(0, positions_T), sin.index_select(0, positions_T)

    def _compute(self, end: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(end, device=self.frequencies.device, dtype=torch.float32)
        angles = (positions[:, None] * self.frequencies)[:, None, None]
        return (angles.cos() * self._scale).to(self.dtype), (angles.sin() * self._scale).to(self.dtype)
