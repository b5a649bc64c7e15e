"""One rank's routed experts of a layer: a tensor-parallel shard of every expert, or some whole experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...conf.experts import ExpertsConfig
from ...kernels.cpp_product import CppProduct
from ...kernels.experts import PackedExperts, SeparateExperts, runs_here
from ...kernels.gated_activation import GatedActivation
from ...kernels.quantized import DequantizedWeight, Product, make_product
from ...kernels.quantized_matrix import QuantizedMatrix
from ...kernels.short_weight import keep_short, short_type
from ...kernels.weight_format import WeightFormat
from ...parallel.mesh import Mesh

Weights = Tensor | Sequence[Product]  # of all experts, [E, out, in]


class RoutedExperts(nn.Module):
    """E experts of inner width F, each down(act(gate(x), up(x))).

    Args:
        hidden_size: H.
        ffn_size: inner width of a whole expert.
        experts: the model's MoE configuration.
        mesh: the mesh whose tensor-parallel ranks share the experts.
        whole: this rank has num_experts / tp whole experts; else a shard of every expert, of width ffn_size / tp.
        dtype: dtype of the activations, and of the weights if `formats` is None.
        device: the weights' device.
        formats: the weight formats of gate_up and of down, both quantized or both 16-bit. If they are quantized, the
            loader fills each expert's matrices before it calls `pack`.
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
        formats: tuple[WeightFormat, WeightFormat] | None = None,
    ) -> None:
        super().__init__()
        tp, H = mesh.tp, hidden_size
        E, width = (experts.num_experts // tp, ffn_size) if whole else (experts.num_experts, ffn_size // tp)
        self.count, self.width = E, width
        self.first = mesh.tp_rank * E if whole else 0  # index of this rank's first expert
        self.activation = GatedActivation.of(experts)
        self.adds_bias = whole or mesh.tp_rank == 0  # on the down projection: once per all-reduce

        def empty(*shape: int, dtype: torch.dtype = dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)

        self._dtype, self._is_short = dtype, formats is not None and formats[0].bits == 16
        types = [dtype, dtype] if formats is None else [short_type(each) or dtype for each in formats]
        held = E if formats is None or self._is_short else 0
        self.gate_up = empty(held, 2 * width, H, dtype=types[0])
        self.down = empty(held, H, width, dtype=types[1])
        self.gate_up_bias = empty(E, 2 * width) if experts.bias else None
        self.down_bias = empty(E, H) if experts.bias else None
        self.packed: PackedExperts | SeparateExperts | None = None
        self._matrices: list[tuple[QuantizedMatrix, QuantizedMatrix]] = []
        self._laid_out: tuple[Sequence[Product], Sequence[Product]] | None = None
        if formats is not None and not self._is_short:
            sizes = ((2 * width, H, formats[0]), (H, width, formats[1]))
            for _ in range(E):
                gate_up, down = (QuantizedMatrix.empty(*size, device) for size in sizes)
                self._matrices.append((gate_up, down))

    @property
    def waits(self) -> bool:
        """Whether the host waits for the device's token counts per expert."""
        return bool(self._matrices) or self._laid_out is not None or self.gate_up.dtype != torch.bfloat16

    def weights(self, i: int) -> tuple[Tensor, Tensor] | tuple[QuantizedMatrix, QuantizedMatrix]:
        """Return the gate_up and down weights of this rank's expert `i`, to be filled on load."""
        return self._matrices[i] if self._matrices else (self.gate_up[i], self.down[i])

    def pack(self) -> None:
        """Pack the weights for this device's GEMMs, if that is faster."""
        dtype, device = self._dtype, self.gate_up.device
        if self._matrices:
            self._take_products(dtype)
        elif self._is_short:
            gate_up, down = ([_lay_out(each, dtype) for each in of] for of in (self.gate_up, self.down))
            self._laid_out = gate_up, down
            self._free()
        if not runs_here(dtype, device):
            return
        biases = self.gate_up_bias, self.down_bias if self.adds_bias else None
        if self._laid_out is None:
            self.packed = PackedExperts(self.gate_up, self.down, *biases, self.activation)
            self._free()
            return
        own = [[each for each in of if isinstance(each, CppProduct) and each.takes_any_rows] for of in self._laid_out]
        if all(len(of) == self.count for of in own):
            self.packed = SeparateExperts(own[0], own[1], *biases, self.activation)

    def _free(self) -> None:
        for name in ("gate_up", "down"):
            setattr(self, name, nn.Parameter(self.gate_up.new_empty(0, dtype=self._dtype), requires_grad=False))

    def _take_products(self, dtype: torch.dtype) -> None:
        """Pack each expert's quantized matrices for the GEMM, and free them."""
        products: tuple[list[Product], list[Product]] = ([], [])
        while self._matrices:
            for matrix, own in zip(self._matrices.pop(0), products, strict=True):
                own.append(make_product(matrix, dtype))
        self._laid_out = products

    def forward(self, x_TH: Tensor, picked_Tk: Tensor, weights_Tk: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return `residual` + the output of this rank's experts, [T, H].

        Args:
            x_TH: the tokens' hidden states.
            picked_Tk: each token's top-k experts, as indices among all experts of the layer.
            weights_Tk: float32, routing weights.
            residual: [T, H]; None: zero.
        """
        if self.packed is not None:
            return self.packed(x_TH, picked_Tk, weights_Tk, self.first, residual)
        T, k = picked_Tk.shape
        E = self.count
        local = picked_Tk.flatten() - self.first
        local = torch.where((local >= 0) & (local < E), local, E)  # experts of other ranks sort last
        order = local.argsort(stable=True)
        ends = (local[:, None] <= torch.arange(E, device=local.device)).sum(0, dtype=torch.int32)
        added = self._products(x_TH[order // k], ends, local[order])
        added = added.float() * weights_Tk.flatten()[order, None]
        added = added.masked_fill((local[order] == E)[:, None], 0.0)  # other ranks' experts: not written
        total = torch.empty_like(added).index_copy_(0, order, added).view(T, k, x_TH.shape[1]).sum(1).to(x_TH.dtype)
        return total if residual is None else residual + total

    def _products(self, x: Tensor, ends_E: Tensor, expert: Tensor) -> Tensor:
        """Return each row's expert output. Rows are sorted by expert; `ends_E` is one past each expert's last row."""
        is_own = expert.clamp(max=self.count - 1)
        gate_up, down = self._laid_out or (self.gate_up, self.down)
        hidden = _grouped_product(x, gate_up, ends_E, 2 * self.width)
        if self.gate_up_bias is not None:
            hidden = hidden + self.gate_up_bias[is_own]
        out = _grouped_product(self.activation(hidden), down, ends_E, x.shape[1])
        return out + self.down_bias[is_own] if self.down_bias is not None and self.adds_bias else out


def _lay_out(weight: Tensor, dtype: torch.dtype) -> Product:
    return keep_short(weight, dtype) or DequantizedWeight(weight.to(dtype))


def _grouped_product(x: Tensor, weight: Weights, ends_E: Tensor, out_size: int) -> Tensor:
    """Return x @ weight[e].T for the rows of each expert e, [rows, out]; rows after the last end are not set.

    For bfloat16 on CUDA this is one grouped GEMM without a device synchronization.
    """
    if x.is_cuda and x.dtype == torch.bfloat16 and isinstance(weight, Tensor):
        return torch._grouped_mm(x, weight.transpose(1, 2), offs=ends_E)
    out = x.new_empty(len(x), out_size)
    begin = 0
    for own, end in zip(weight, ends_E.tolist(), strict=True):
        if end > begin:
            rows = x[begin:end]
            out[begin:end] = F.linear(rows, own) if isinstance(own, Tensor) else own.linear(rows)
        begin = end
    return out
