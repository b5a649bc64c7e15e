"""Predicts operator times from a device's constants: a kernel's time follows from its tiles, its bytes, its launch."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from typing import Literal

from ...conf.clusters import ClusterConfig
from ...conf.costs import AttentionKernels, CostsConfig
from ...conf.schema import Architecture
from ...parallel.placement import StageLink
from .attention import AttentionCost
from .gemm import Gemm, Products
from .operators import LAYER_LINEARS, HostTimes, Linear
from .pointwise import Pointwise
from .topology import Topology


class AnalyticOperators:
    """Operator times of a model in `tp` slices, from a device's constants (docs/cost_model.md). An `Operators`.

    Args:
        cluster: nodes, and the links that are not the device's own; None: the default.
        between_racks: the ranks lie in several racks.
        attention: the library whose kernels compute it.
        launch: how the host launches kernels.
        replicate_embedding: each rank holds the whole embedding, so that no all-reduce follows it.
    """

    def __init__(
        self, arch: Architecture, tp: int, costs: CostsConfig, dtype_bytes: int, *,
        cluster: ClusterConfig | None = None, between_racks: bool = False, replicate_embedding: bool = False,
        attention: AttentionKernels = "flashinfer", launch: Literal["graphs", "eager"] = "graphs",
    ) -> None:
        H, D, N, K = arch.hidden_size, arch.head_dim, arch.num_heads // tp, max(1, arch.num_kv_heads // tp)
        ffn, gate = arch.ffn_size // tp, 2 if arch.gated_ffn else 1
        self.tp = tp
        self.topology = Topology(cluster or ClusterConfig(), costs, tp, between_racks=between_racks)
        host = costs.host if launch == "graphs" or costs.eager_host is None else costs.eager_host
        self.host = HostTimes(host.step_us * 1e-6, host.row_us * 1e-6, host.layer_us * 1e-6, host.stretch)
        sizes: dict[Linear, tuple[int, int]] = {  # (inputs, outputs) of the weight on one rank
            "preproj": (H, (N + 2 * K) * D),
            "postproj": (N * D, H),
            "ffn_ln1": (H, gate * ffn),
            "ffn_ln2": (ffn, H),
            "head": (H, -(-arch.vocab_size // tp)),
        }
        gemm = Gemm(costs.gemm, costs.multiprocessors, dtype_bytes)
        self._layer = Products(gemm, [sizes[name] for name in LAYER_LINEARS])
        self._head = Products(gemm, [sizes["head"]])
        self._attention = AttentionCost(costs.attention.of(attention), N, K, D, costs.multiprocessors, dtype_bytes)
        self._window = arch.sliding_window
        rates, row, head_row = costs.pointwise, H * dtype_bytes, (N + K) * D
        norm, add = (H, 2 * row, rates.norm_gbps), (0, 3 * row, rates.add_gbps)
        kernels = [norm, norm, add, add]
        if arch.qk_norm:
            kernels.append((D, 2 * head_row * dtype_bytes, rates.norm_gbps))
        if arch.position == "rope":
            kernels.append((head_row, 2 * head_row * dtype_bytes, rates.rope_gbps))
        kernels.append((gate * ffn, (gate + 1) * ffn * dtype_bytes, rates.activation_gbps))
        kernels.append((0, 4 * K * D * dtype_bytes, rates.copy_gbps))
        self._others = Pointwise(rates, kernels)
        embedding = [(0, 2 * row, rates.embedding_gbps)]
        if arch.position == "learned":
            embedding += [(0, 2 * row, rates.embedding_gbps), add]
        self._embedding = Pointwise(rates, embedding)
        self._replicates_embedding = replicate_embedding
        self._row_bytes = row

    def linear(self, operator: Linear, rows: int) -> float:
        if operator == "head":
            return self._head.seconds(rows)[0]
        return self._layer.seconds(rows)[LAYER_LINEARS.index(operator)]

    def others(self, rows: int) -> float:
        return self._others.seconds(rows)

    def embedding(self, rows: int) -> float:
        return self._embedding.seconds(rows) + (0.0 if self._replicates_embedding else self.all_reduce(rows))

    def chunk_attention(self, length: int, prefix: int) -> float:
        if self._window is not None:
            prefix = min(prefix, self._window)
        return self._attention.chunk(length, prefix)

    def decode_attention(self, requests: int, context: int) -> float:
        if self._window is not None:
            context = min(context, requests * self._window)
        return self._attention.decodes(requests, context)

    def all_reduce(self, rows: int) -> float:
        return self.topology.all_reduce(rows * self._row_bytes) if self.tp > 1 else 0.0

    def send(self, rows: int, *, link: StageLink, scatter_gather: bool) -> float:
        size = rows * self._row_bytes
        if not scatter_gather or self.tp == 1:
            return self.topology.send(size, link)
        return self.topology.send(size / self.tp, link) + self.topology.gather(size)
