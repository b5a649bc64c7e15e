"""Predicts operator times from a device's constants: each kernel's tiles, bytes moved and launch time."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

from ....conf.architecture import Architecture, LayerKind
from ....conf.clusters import ClusterConfig
from ....conf.costs import AttentionKernels, CostsConfig, PointwiseConfig
from ....conf.experts import ExpertsConfig
from ....kernels.weight_format import WeightFormat
from ....models.memory import kv_row_bytes
from ....parallel.placement import StageLink
from .attention import AttentionCost
from .experts import ExpertProducts, Routing
from .gemm import Gemm, Products
from .operators import LAYER_LINEARS, HostTimes, Linear
from .pointwise import Pointwise
from .topology import Topology

_NORMS = {"both": 4, "shared": 1}  # norms per layer, by `Architecture.norms`; else 2


Kernel = tuple[float, float, float]  # of `Pointwise`


class _Rank:
    """What one of `tp` ranks computes of a layer, as sizes of GEMMs, (inputs, outputs), and pointwise kernels."""

    def __init__(self, arch: Architecture, kind: LayerKind, tp: int, expert_parallel: bool, dtype_bytes: int) -> None:
        self.arch, self.dtype_bytes, self.row_bytes = arch, dtype_bytes, arch.hidden_size * dtype_bytes
        self.N, self.K = arch.num_heads // tp, max(1, arch.num_kv_heads // tp)
        self.gate = 2 if arch.gated_ffn else 1
        self.experts = arch.experts if kind.experts else None
        width = arch.ffn_size if self.experts is None else arch.expert_size
        self.ffn = width if expert_parallel and self.experts is not None else width // tp
        self.shared_ffn = 0 if self.experts is None else self.experts.shared_ffn_size // tp

    def linears(self) -> list[list[tuple[int, int]]]:
        """Return the GEMMs of each of `LAYER_LINEARS`. With MLA, queries attend to the compressed KV."""
        H, D, N, latent = self.arch.hidden_size, self.arch.head_dim, self.N, self.arch.latent
        ffn = [[(H, self.gate * self.ffn)], [(self.ffn, H)]]
        if latent is None:
            return [[(H, (N + 2 * self.K) * D)], [(N * D, H)], *ffn]
        rank = latent.query_rank or 0
        made = (rank or H, N * latent.query_dim)
        return [
            [(H, rank + latent.cached), made, (latent.head_dim, N * latent.rank)],
            [(latent.rank, N * latent.value_dim), (N * latent.value_dim, H)],
            *ffn,
        ]

    def shared(self) -> list[tuple[int, int]]:
        """Return the GEMMs of the shared expert."""
        return [(self.arch.hidden_size, self.gate * self.shared_ffn), (self.shared_ffn, self.arch.hidden_size)]

    def embedding(self, rates: PointwiseConfig) -> list[Kernel]:
        """Return the look-up of tokens, and of positions with their addition."""
        look_up = (0.0, 2.0 * self.row_bytes, rates.embedding_gigabytes_per_s)
        return [look_up] if self.arch.position == "rope" else [look_up, look_up, self._add(rates)]

    def norms_and_residuals(self, rates: PointwiseConfig) -> list[Kernel]:
        """Return the norms of a layer, and the two additions to its residual."""
        norm: Kernel = (self.arch.hidden_size, 2 * self.row_bytes, rates.norm_gigabytes_per_s)
        return [norm] * _NORMS.get(self.arch.norms, 2) + [self._add(rates)] * 2

    def heads(self, rates: PointwiseConfig) -> list[Kernel]:
        """Return the norms of heads, and the rotation of queries and keys."""
        arch, row = self.arch, (self.N + self.K) * self.arch.head_dim
        if arch.latent is not None:
            row = self.N * arch.latent.query_dim + arch.latent.cached
        norm: Kernel = (arch.head_dim, 2 * row * self.dtype_bytes, rates.norm_gigabytes_per_s)
        rotation: Kernel = (row, 2 * row * self.dtype_bytes, rates.rope_gigabytes_per_s)
        return [norm] * arch.qk_norm + [rotation] * (arch.position == "rope")

    def activations(self, pairs: float, rates: PointwiseConfig) -> list[Kernel]:
        """Return the activation of the feed-forward network, of `pairs` experts per token, and of the shared expert."""
        found: list[Kernel] = []
        for size, rows in ((self.ffn, pairs), (self.shared_ffn, 1.0)):
            if size:
                moved = rows * (self.gate + 1) * size * self.dtype_bytes
                found.append((self.gate * size, moved, rates.activation_gigabytes_per_s))
        return found

    def cache_writes(self, key_bytes: int, rates: PointwiseConfig) -> Kernel:
        """Return the write of a token's keys and values, `key_bytes` each, to the cache."""
        written = 2 * self.K * (self.arch.head_dim * self.dtype_bytes + key_bytes)
        if self.arch.latent is not None:
            written = 2 * self.arch.latent.cached * self.dtype_bytes
        return 0, written, rates.copy_gigabytes_per_s

    def routing(self, experts: ExpertsConfig, pairs: float, rates: PointwiseConfig) -> list[Kernel]:
        """Return top-k, the sort of token-expert pairs, and the sum of outputs. Grouped GEMMs gather their rows."""
        number = experts.num_experts
        return [
            (number, number * self.dtype_bytes, rates.norm_gigabytes_per_s),
            (number, 0, rates.copy_gigabytes_per_s),
            (0, (pairs + 1) * self.row_bytes, rates.add_gigabytes_per_s),
        ]

    def _add(self, rates: PointwiseConfig) -> Kernel:
        return 0, 3 * self.row_bytes, rates.add_gigabytes_per_s


def _window_shares(arch: Architecture, kind: LayerKind | None) -> list[tuple[int | None, float]]:
    """Return the windows of the layers, or of one kind, with the share of layers that have each."""
    windows: dict[int | None, float] = {}
    for each, count in [(kind, 1)] if kind is not None else arch.kinds.items():
        windows[each.window] = windows.get(each.window, 0.0) + count
    return [(window, share / sum(windows.values())) for window, share in windows.items()]


class AnalyticOperators:
    """Operator times of one of `tp` ranks, from a device's constants (docs/cost_model.md). An `Operators`.

    Args:
        cluster: nodes, and links that override the device's; None: the default.
        between_racks: the ranks span several racks.
        attention: the attention library.
        launch: how the host launches kernels.
        replicate_embedding: each rank holds the whole embedding, so that no all-reduce follows it.
        expert_parallel: each rank has whole experts; else a tensor-parallel shard of each.
        expert_skew: how unevenly tokens are routed to experts (`Routing`).
        cache_dtype: `cache.dtype`.
        layers, head: weight formats of the layers' GEMMs and of the LM head; None: not quantized.
        kind: the layers' kind; None: the first layer's, averaged over the windows of all layers.
    """

    def __init__(
        self,
        arch: Architecture,
        tp: int,
        costs: CostsConfig,
        dtype_bytes: int,
        *,
        cluster: ClusterConfig | None = None,
        between_racks: bool = False,
        replicate_embedding: bool = False,
        attention: AttentionKernels = "flashinfer",
        launch: Literal["graphs", "eager"] = "graphs",
        expert_parallel: bool = False,
        expert_skew: float = 0.0,
        layers: WeightFormat | None = None,
        head: WeightFormat | None = None,
        cache_dtype: str = "auto",
        kind: LayerKind | None = None,
    ) -> None:
        rank, rates = _Rank(arch, kind or arch.kind(0), tp, expert_parallel, dtype_bytes), costs.pointwise
        host, kernels, processors = costs.host_of(launch), costs.attention.of(attention), costs.multiprocessors
        key_bytes = kv_row_bytes(arch.head_dim, dtype_bytes, cache_dtype)
        plain, gemm, head_gemm = (
            Gemm(
                *(costs.gemm, processors, dtype_bytes, format),
                fuses_casts=launch == "graphs",
                byte_tflops=host.byte_tflops,
            )
            for format in (None, layers, head)
        )
        self.tp, self._row_bytes = tp, rank.row_bytes
        self.topology = Topology(
            cluster or ClusterConfig(), costs, tp, between_racks=between_racks, graphs=launch == "graphs"
        )
        self.host = HostTimes.of(host, tp)
        self._bulk_rate = (
            host.bulk_gigabytes_per_s * 1e9 if tp > 2 else 0.0
        )  # bytes/s; 0: large all-reduces have no rate of their own
        self._bulk_bytes = host.bulk_mib * 2**20

        self._embedding = Pointwise(rates, rank.embedding(rates))
        self._replicates_embedding = replicate_embedding
        linears = rank.linears() if rank.experts is None else rank.linears()[:2]
        self._layer = Products(gemm, [size for sizes in linears for size in sizes])
        self._ends = [0, *accumulate(map(len, linears))]  # end of each operator's weights in `_layer`
        self._attention = AttentionCost(kernels, rank.N, rank.K, arch.head_dim, processors, dtype_bytes, key_bytes)
        self._expanded: AttentionCost | None = None
        if (latent := arch.latent) is not None:  # or a chunk expands its context's compressed KV to keys and values
            self._expanded = AttentionCost(kernels, rank.N, rank.N, latent.query_dim, processors, dtype_bytes)
            self._expand = Products(gemm, [(latent.rank, rank.N * (latent.head_dim + latent.value_dim))])
        self._windows = _window_shares(arch, kind)
        self._experts: ExpertProducts | None = None
        pairs = 1.0
        if rank.experts is not None:
            routing = Routing(rank.experts, expert_skew, tp if expert_parallel else 1)
            _, _, (up,), (down,) = rank.linears()
            shared = Products(gemm, rank.shared()) if rank.shared_ffn else None
            self._experts, pairs = ExpertProducts(gemm, routing, up, down, shared), routing.pairs
            self._router = Products(plain, [(arch.hidden_size, rank.experts.num_experts)])
            self._routing = Pointwise(rates, rank.routing(rank.experts, pairs, rates))
        self._others = Pointwise(
            rates,
            [
                *rank.norms_and_residuals(rates),
                *rank.heads(rates),
                *rank.activations(pairs, rates),
                rank.cache_writes(key_bytes, rates),
            ],
        )
        self._head = Products(head_gemm, [(arch.hidden_size, -(-arch.vocab_size // tp))])

    def linear(self, operator: Linear, rows: int) -> float:
        """See `Operators.linear`."""
        if operator == "head":
            return self._head.seconds(rows)[0]
        if self._experts is not None and operator in ("ffn_ln1", "ffn_ln2"):
            return self._experts.seconds(rows)[int(operator == "ffn_ln2")]
        place = LAYER_LINEARS.index(operator)
        return sum(self._layer.seconds(rows)[self._ends[place] : self._ends[place + 1]])

    def others(self, rows: int) -> float:
        """See `Operators.others`."""
        return self._others.seconds(rows)

    def routing(self, rows: int) -> float:
        """See `Operators.routing`."""
        return 0.0 if self._experts is None else self._router.seconds(rows)[0] + self._routing.seconds(rows)

    def embedding(self, rows: int) -> float:
        """See `Operators.embedding`."""
        return self._embedding.seconds(rows) + (0.0 if self._replicates_embedding else self.all_reduce(rows))

    def chunk_attention(self, length: int, prefix: int) -> float:
        """See `Operators.chunk_attention`. A sliding window bounds the prefix; the mean over the layers."""
        seconds = 0.0
        for window, share in self._windows:
            seconds += share * self._chunk(length, prefix if window is None else min(prefix, window))
        return seconds

    def chunks_attention(self, chunks: Sequence[tuple[int, int]]) -> float:
        """See `Operators.chunks_attention`. One kernel computes them if the library batches chunks."""
        if not self._attention.chunks_together or self._expanded is not None:
            return sum([self.chunk_attention(length, prefix) for length, prefix in chunks])
        seconds = 0.0
        for window, share in self._windows:
            within = chunks if window is None else [(length, min(prefix, window)) for length, prefix in chunks]
            seconds += share * self._attention.chunks(within)
        return seconds

    def _chunk(self, length: int, prefix: int) -> float:
        seconds = self._attention.chunk(length, prefix)
        if self._expanded is not None:
            expanded = self._expanded.chunk(length, prefix) + self._expand.seconds(prefix + length)[0]
            seconds = min(seconds, expanded)
        return seconds

    def decode_attention(self, requests: int, context: int) -> float:
        """See `Operators.decode_attention`. A sliding window bounds each decode's context; the mean over the layers."""
        seconds = 0.0
        for window, share in self._windows:
            within = context if window is None else min(context, requests * window)
            seconds += share * self._attention.decodes(requests, within)
        return seconds

    def all_reduce(self, rows: int) -> float:
        """See `Operators.all_reduce`. Large ones are limited to the device's bulk rate."""
        if self.tp == 1:
            return 0.0
        size = rows * self._row_bytes
        seconds = self.topology.all_reduce(size)
        if self._bulk_rate and size >= self._bulk_bytes:
            seconds = max(seconds, 2 * (self.tp - 1) / self.tp * size / self._bulk_rate)
        return seconds

    def send(self, rows: int, *, link: StageLink, scatter_gather: bool) -> float:
        """See `Operators.send`. With scatter/gather, each rank sends its shard, and the next stage all-gathers."""
        size = rows * self._row_bytes
        if not scatter_gather or self.tp == 1:
            return self.topology.send(size, link)
        return self.topology.send(size / self.tp, link) + self.topology.gather(size)
