"""The activation of an expert's gate and up projection."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..conf.experts import ExpertsConfig


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """min(gate, limit) * sigmoid(factor * min(gate, limit)) * (clamp(up, limit) + shift).

    The defaults give SwiGLU; a limit and a shift of 1 give gpt-oss's activation.
    """

    limit: float = math.inf
    factor: float = 1.0
    shift: float = 0.0

    @classmethod
    def of(cls, experts: ExpertsConfig) -> GatedActivation:
        """Return the activation of a model's experts."""
        if experts.clamp is None:
            return cls()
        return cls(limit=experts.clamp, factor=experts.sigmoid_factor, shift=1.0)

    def __call__(self, gate_up: Tensor) -> Tensor:
        """Return the activation, [rows, F], of the concatenated gate and up projections, [rows, 2 F]."""
        gate, up = gate_up.chunk(2, dim=-1)
        if self == GatedActivation():
            return F.silu(gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.factor * gate) * (up + self.shift)
