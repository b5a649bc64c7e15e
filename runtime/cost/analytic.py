"""Operator times from a device's constants: a roofline over whole tiles."""

from __future__ import annotations

from ...conf.costs import CostsConfig
from ...conf.schema import Architecture
from .operators import Linear


class AnalyticOperators:
    """`Operators` of a model cut in `tp` slices: each kernel takes its FLOPs over the tiles it touches or its bytes,
    whichever is longer, and a launch."""

    layer_overhead = 0.0
    step_overhead = 0.0

    def __init__(self, arch: Architecture, tp: int, costs: CostsConfig, dtype_bytes: int) -> None:
        H, D = arch.hidden_size, arch.head_dim
        self.tp = tp
        self.costs = costs
        self.hidden_bytes = H * dtype_bytes
        self._element = dtype_bytes
        self._heads = arch.num_heads // tp
        self._kv_bytes = 2 * (arch.num_kv_heads // tp) * D * dtype_bytes
        self._query_size = self._heads * D
        gate = 2 if arch.gated_ffn else 1
        self._sizes: dict[Linear, tuple[int, int]] = {  # inputs, outputs
            "preproj": (H, (arch.num_heads + 2 * arch.num_kv_heads) * D // tp),
            "postproj": (arch.num_heads * D // tp, H),
            "ffn_ln1": (H, gate * arch.ffn_size // tp),
            "ffn_ln2": (arch.ffn_size // tp, H),
            "head": (H, -(-arch.vocab_size // tp)),
        }

    def linear(self, operator: Linear, rows: int) -> float:
        inputs, outputs = self._sizes[operator]
        tile = self.costs.tile
        flops = 2 * -(-rows // tile) * tile * inputs * outputs
        return self._kernel(flops, (inputs * outputs + rows * (inputs + outputs)) * self._element)

    def others(self, rows: int) -> float:
        return self._kernel(0, 12 * rows * self.hidden_bytes) + 5e-6 * self.costs.launch_us

    def embedding(self, rows: int) -> float:
        return self._kernel(0, 2 * rows * self.hidden_bytes) + self.all_reduce(rows)

    def chunk_attention(self, length: int, prefix: int) -> float:
        flops = 4 * length * (prefix + length / 2) * self._query_size
        return self._kernel(flops, (prefix + length) * self._kv_bytes)

    def decode_attention(self, requests: int, context: int) -> float:
        return self._kernel(0, context * self._kv_bytes)

    def all_reduce(self, rows: int) -> float:
        if self.tp == 1:
            return 0.0
        size = 2 * (self.tp - 1) / self.tp * rows * self.hidden_bytes
        return self.costs.message_us * 1e-6 + size / (self.costs.node_gbps * 1e9)

    def send(self, rows: int, *, between_nodes: bool, scatter_gather: bool) -> float:
        size = rows * self.hidden_bytes
        rate = (self.costs.network_gbps if between_nodes else self.costs.node_gbps) * 1e9
        gather = 0.0
        if scatter_gather and self.tp > 1:
            gather = self.costs.message_us * 1e-6 + size * (self.tp - 1) / self.tp / (self.costs.node_gbps * 1e9)
            size //= self.tp
        return self.costs.message_us * 1e-6 + size / rate + gather

    def _kernel(self, flops: float, size: float) -> float:
        costs = self.costs
        return max(costs.launch_us * 1e-6, flops / (costs.matmul_tflops * 1e12), size / (costs.memory_gbps * 1e9))
