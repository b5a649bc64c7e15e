"""Predicts operator times from a device's constants: a kernel's time follows from its tiles, its bytes, its launch."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ...conf.architecture import Architecture, LayerKind
from ...conf.clusters import ClusterConfig
from ...conf.costs import AttentionKernels, CostsConfig
from ...kernels.weight_format import WeightFormat
from ...models.memory import kv_row_bytes
from ...parallel.placement import StageLink
from .attention import AttentionCost
from .experts import ExpertProducts, Routing
from .gemm import Gemm, Products
from .operators import LAYER_LINEARS, HostTimes, Linear
from .pointwise import Pointwise
from .topology import Topology

_NORMS = {"both": 4, "shared": 1}  # of a layer, by `Architecture.norms`; else 2


class AnalyticOperators:
    """Operator times of a model in `tp` slices, from a device's constants (docs/cost_model.md). An `Operators`.

    Args:
        cluster: nodes, and the links that are not the device's own; None: the default.
        between_racks: the ranks lie in several racks.
        attention: the library whose kernels compute it.
        launch: how the host launches kernels.
        replicate_embedding: each rank holds the whole embedding, so that no all-reduce follows it.
        expert_parallel: each rank holds whole experts; else a slice of each.
        expert_skew: how unevenly tokens are routed to experts (`Routing`).
        cache_dtype: `cache.dtype`.
        layers, head: how the weights of the layers' products, and of the LM head, are quantized; None: they are not.
        kind: of the layers; None: the first one's, with the mean over the windows of all.
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
        H, D, N, K = arch.hidden_size, arch.head_dim, arch.num_heads // tp, max(1, arch.num_kv_heads // tp)
        experts = arch.experts if (kind or arch.kind(0)).experts else None
        width, gate = arch.ffn_size if experts is None else arch.expert_size, 2 if arch.gated_ffn else 1
        ffn = width if expert_parallel and experts is not None else width // tp
        self.tp = tp
        self.topology = Topology(
            cluster or ClusterConfig(), costs, tp, between_racks=between_racks, graphs=launch == "graphs"
        )
        host = costs.host_of(launch)
        self.host = HostTimes.of(host, tp)
        self._bulk_rate = (
            host.bulk_gigabytes_per_s * 1e9 if tp > 2 else 0.0
        )  # bytes/s; 0: large all-reduces are like others
        self._bulk_bytes = host.bulk_mib * 2**20
        sizes: dict[Linear, list[tuple[int, int]]] = {  # (inputs, outputs) of the weights on one rank
            "preproj": [(H, (N + 2 * K) * D)],
            "postproj": [(N * D, H)],
            "ffn_ln1": [(H, gate * ffn)],
            "ffn_ln2": [(ffn, H)],
            "head": [(H, -(-arch.vocab_size // tp))],
        }
        plain, gemm, head_gemm = (
            Gemm(
                *(costs.gemm, costs.multiprocessors, dtype_bytes, format),
                fuses_casts=launch == "graphs",
                byte_tflops=host.byte_tflops,
            )
            for format in (None, layers, head)
        )
        latent, head_row = arch.latent, (N + K) * D
        if latent is not None:  # queries are turned into ones of latents, and what they attend to into values
            rank, head_row = latent.query_rank or 0, N * latent.query_dim + latent.cached
            made = (rank or H, N * latent.query_dim)
            sizes["preproj"] = [(H, rank + latent.cached), made, (latent.head_dim, N * latent.rank)]
            sizes["postproj"] = [(latent.rank, N * latent.value_dim), (N * latent.value_dim, H)]
        dense = LAYER_LINEARS if experts is None else LAYER_LINEARS[:2]
        self._layer = Products(gemm, [size for name in dense for size in sizes[name]])
        self._ends = [0]  # of each operator's weights among those
        for name in dense:
            self._ends.append(self._ends[-1] + len(sizes[name]))
        self._head = Products(head_gemm, sizes["head"])
        kernels_of, key_bytes = costs.attention.of(attention), kv_row_bytes(D, dtype_bytes, cache_dtype)
        self._attention = AttentionCost(kernels_of, N, K, D, costs.multiprocessors, dtype_bytes, key_bytes)
        self._expanded: AttentionCost | None = None
        if latent is not None:  # or a chunk makes keys and values of its context's latents
            own = latent.query_dim
            self._expanded = AttentionCost(kernels_of, N, N, own, costs.multiprocessors, dtype_bytes)
            self._expand = Products(gemm, [(latent.rank, N * (latent.head_dim + latent.value_dim))])
        windows: dict[int | None, float] = {}
        for each, count in [(kind, 1)] if kind is not None else arch.kinds.items():
            windows[each.window] = windows.get(each.window, 0.0) + count
        self._windows = [(window, share / sum(windows.values())) for window, share in windows.items()]
        rates, row = costs.pointwise, H * dtype_bytes
        norm, add = (H, 2 * row, rates.norm_gigabytes_per_s), (0, 3 * row, rates.add_gigabytes_per_s)
        kernels: list[tuple[float, float, float]] = [*(norm for _ in range(_NORMS.get(arch.norms, 2))), add, add]
        if arch.qk_norm:
            kernels.append((D, 2 * head_row * dtype_bytes, rates.norm_gigabytes_per_s))
        if arch.position == "rope":
            kernels.append((head_row, 2 * head_row * dtype_bytes, rates.rope_gigabytes_per_s))
        self._experts: ExpertProducts | None = None
        if experts is None:
            kernels.append((gate * ffn, (gate + 1) * ffn * dtype_bytes, rates.activation_gigabytes_per_s))
        else:
            routing = Routing(experts, expert_skew, tp if expert_parallel else 1)
            beside = experts.shared_ffn_size // tp
            shared = Products(gemm, [(H, gate * beside), (beside, H)]) if beside else None
            self._experts = ExpertProducts(gemm, routing, sizes["ffn_ln1"][0], sizes["ffn_ln2"][0], shared)
            number = experts.num_experts
            self._router = Products(plain, [(H, number)])
            # Picking the k best, sorting the pairs by expert, and summing their outputs. Products gather their rows.
            self._routing = Pointwise(
                rates,
                [
                    (number, number * dtype_bytes, rates.norm_gigabytes_per_s),
                    (number, 0, rates.copy_gigabytes_per_s),
                    (0, (routing.pairs + 1) * row, rates.add_gigabytes_per_s),
                ],
            )
            for size, rows in ((ffn, routing.pairs), (beside, 1.0)):
                if size:
                    kernels.append(
                        (gate * size, rows * (gate + 1) * size * dtype_bytes, rates.activation_gigabytes_per_s)
                    )
        written = 2 * K * (D * dtype_bytes + key_bytes) if latent is None else 2 * latent.cached * dtype_bytes
        kernels.append((0, written, rates.copy_gigabytes_per_s))
        self._others = Pointwise(rates, kernels)
        embedding = [(0.0, 2.0 * row, rates.embedding_gigabytes_per_s)]
        if arch.position == "learned":
            embedding += [(0.0, 2.0 * row, rates.embedding_gigabytes_per_s), add]
        self._embedding = Pointwise(rates, embedding)
        self._replicates_embedding = replicate_embedding
        self._row_bytes = row

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
        """See `Operators.chunk_attention`. A window bounds how far back the chunk attends; the mean over the layers."""
        seconds = 0.0
        for window, share in self._windows:
            seconds += share * self._chunk(length, prefix if window is None else min(prefix, window))
        return seconds

    def chunks_attention(self, chunks: Sequence[tuple[int, int]]) -> float:
        """See `Operators.chunks_attention`. One kernel computes them together where the library's does."""
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
        """See `Operators.decode_attention`. A window bounds the context of each decode; the mean over the layers."""
        seconds = 0.0
        for window, share in self._windows:
            within = context if window is None else min(context, requests * window)
            seconds += share * self._attention.decodes(requests, within)
        return seconds

    def all_reduce(self, rows: int) -> float:
        """See `Operators.all_reduce`. Large ones take no less than the device's rate for bulk allows."""
        if self.tp == 1:
            return 0.0
        size = rows * self._row_bytes
        seconds = self.topology.all_reduce(size)
        if self._bulk_rate and size >= self._bulk_bytes:
            seconds = max(seconds, 2 * (self.tp - 1) / self.tp * size / self._bulk_rate)
        return seconds

    def send(self, rows: int, *, link: StageLink, scatter_gather: bool) -> float:
        """See `Operators.send`. With scatter/gather each rank sends its share, and the next stage gathers."""
        size = rows * self._row_bytes
        if not scatter_gather or self.tp == 1:
            return self.topology.send(size, link)
        return self.topology.send(size / self.tp, link) + self.topology.gather(size)
