"""The routed experts of a layer that one rank holds: a slice of every expert, or some whole ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...conf.experts import ExpertsConfig
from ...parallel.mesh import Mesh
from .activation import GatedActivation
from .cpp import PackedExperts, runs_here


class RoutedExperts(nn.Module):
    """E experts of inner width F, each down(act(gate(x), up(x))).

    Args:
        hidden_size: H.
        ffn_size: inner width of a whole expert.
        experts: of the model.
        mesh: whose tensor-parallel ranks share the experts.
        whole: this rank holds whole experts, num_experts / tp of them; else a slice of each, of width ffn_size / tp.
        dtype: of the weights.
        device: of the weights.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        experts: ExpertsConfig,
        *,
        mesh: Mesh,
        whole: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        tp = mesh.tp
        E, width = (experts.num_experts // tp, ffn_size) if whole else (experts.num_experts, ffn_size // tp)
        self.first = mesh.tp_rank * E if whole else 0  # of the experts that this rank holds
        self.activation = GatedActivation.of(experts)
        self.adds_bias = whole or mesh.tp_rank == 0  # on the down projection: once in the sum over the ranks

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)

        self.gate_up = empty(E, 2 * width, hidden_size)
        self.down = empty(E, hidden_size, width)
        self.gate_up_bias = empty(E, 2 * width) if experts.bias else None
        self.down_bias = empty(E, hidden_size) if experts.bias else None
        self.packed: PackedExperts | None = None

    def pack(self) -> None:
        """Lay the weights out for the products of this device, if there is something to gain."""
        if not runs_here(self.gate_up.dtype, self.gate_up.device):
            return
        bias = self.down_bias if self.adds_bias else None
        self.packed = PackedExperts(self.gate_up, self.down, self.gate_up_bias, bias, self.activation)
        for name in ("gate_up", "down"):
            setattr(self, name, nn.Parameter(self.gate_up.new_empty(0), requires_grad=False))

    def forward(self, x_TH: Tensor, picked_Tk: Tensor, weights_Tk: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return `residual` + what this rank's experts add to each token, [T, H].

        Args:
            x_TH: the tokens.
            picked_Tk: the experts of each token, of all the model's.
            weights_Tk: float32, what the output of each counts.
            residual: [T, H]; None: zero.
        """
        if self.packed is not None:
            return self.packed(x_TH, picked_Tk, weights_Tk, self.first, residual)
        T, k = picked_Tk.shape
        E = len(self.down)
        local = picked_Tk.flatten() - self.first
        local = torch.where((local >= 0) & (local < E), local, E)  # those of other ranks lie last
        order = local.argsort(stable=True)
        ends = (local[:, None] <= torch.arange(E, device=local.device)).sum(0, dtype=torch.int32)
        added = self._products(x_TH[order // k], ends, local[order])
        added = added.float() * weights_Tk.flatten()[order, None]
        added = added.masked_fill((local[order] == E)[:, None], 0.0)  # rows that no product has written
        total = torch.empty_like(added).index_copy_(0, order, added).view(T, k, x_TH.shape[1]).sum(1).to(x_TH.dtype)
        return total if residual is None else residual + total

    def _products(self, x: Tensor, ends_E: Tensor, expert: Tensor) -> Tensor:
        """Return each row's output of its expert. Rows are sorted by expert; `ends_E` is one past each one's last."""
        is_own = expert.clamp(max=len(self.down) - 1)
        hidden = _grouped_product(x, self.gate_up, ends_E)
        if self.gate_up_bias is not None:
            hidden = hidden + self.gate_up_bias[is_own]
        out = _grouped_product(self.activation(hidden), self.down, ends_E)
        return out + self.down_bias[is_own] if self.down_bias is not None and self.adds_bias else out


def _grouped_product(x: Tensor, weight: Tensor, ends_E: Tensor) -> Tensor:
    """Return x @ weight[e].T for the rows of each expert e; rows after the last end are not set.

    On CUDA it is one kernel for bfloat16, and the host does not wait for the ends.
    """
    if x.is_cuda and x.dtype == torch.bfloat16:
        return torch._grouped_mm(x, weight.transpose(1, 2), offs=ends_E)
    out = x.new_empty(len(x), weight.shape[1])
    begin = 0
    for own, end in zip(weight, ends_E.tolist(), strict=True):
        if end > begin:
            out[begin:end] = F.linear(x[begin:end], own)
        begin = end
    return out
