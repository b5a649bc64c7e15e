"""A pipeline stage: the embedding (first stage), decoder layers and their KV cache, norm and LM head (last stage)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..conf.architecture import Architecture, LayerKind
from ..kernels import huge_pages
from ..kernels.processor import multiplies_bfloat16
from ..parallel.groups import Groups
from ..parallel.layers import LMHead, Packable, Parts, ReplicatedEmbedding, VocabParallelEmbedding
from .attention.backend import AttentionBackend, AttentionSizes
from .attention.select import make_backend
from .batch import RaggedBatch
from .batch_context import BatchContext
from .block_groups import ONE_TABLE, Windows, places
from .decode_layers import DecodeLayers, find_decode_layers
from .decoder import DecoderLayer
from .experts.routed import RoutedExperts
from .experts.router import ExpertRouter
from .kernels.select import make_kernels
from .kv_cache import KVCache, positions, slot_mapping
from .layer_build import LayerBuild
from .quantization.formats import ModelFormats, plain_formats
from .rope import RotaryEmbedding
from .transfers import upload


def rotation(kind: LayerKind) -> LayerKind | None:
    """Return the kind by its rotary positions alone; None where it has none."""
    return replace(kind, window=None) if kind.rope else None


@dataclass(frozen=True, slots=True)
class StageInputs:
    """What a stage needs of a micro-batch beside the previous stage's activation, on the stage's device."""

    num_tokens: int
    token_ids: Tensor | None  # [T], on the first stage
    positions: Tensor  # [T]
    contexts: Sequence[BatchContext]  # by layer of the stage, the same one for layers of a kind and group
    last_context: BatchContext  # of the stage's last layer, where it computes fewer rows


class Stage(nn.Module):
    """This rank's slice of a stage: the layers `layers` of the model, and their KV cache.

    `windows` are those of the groups of layers that have block tables of their own (`models/block_groups.py`).
    """

    def __init__(
        self,
        arch: Architecture,
        groups: Groups,
        layers: range,
        *,
        dtype: torch.dtype,
        attention: str,
        num_blocks: int,
        block_size: int,
        replicate_embedding: bool = False,
        kernels: str = "auto",
        whole_experts: bool = False,
        formats: ModelFormats | None = None,
        cache_dtype: str = "auto",
        windows: Windows = ONE_TABLE,
    ) -> None:
        super().__init__()
        formats = formats or plain_formats(arch)
        self.dtype = dtype  # of the weights and the activations
        self.arch = arch
        self.mesh = groups.mesh
        self.layers = layers
        self.device = groups.device
        H, device = arch.hidden_size, groups.device
        self.embedding: VocabParallelEmbedding | ReplicatedEmbedding | None = None
        self.position_embedding: nn.Parameter | None = None
        if self.mesh.is_first:
            kind = ReplicatedEmbedding if replicate_embedding else VocabParallelEmbedding
            self.embedding = kind(arch.vocab_size, H, dtype=dtype, groups=groups, format=formats.embedding)
            if arch.position == "learned":
                self.position_embedding = nn.Parameter(torch.empty(arch.max_position, H, dtype=dtype, device=device))
        self.kinds = [arch.kind(layer) for layer in layers]
        found = places([kind.window for kind in self.kinds], windows)
        self.groups = [group for group, _ in found]  # by layer
        self.cache = KVCache(
            places=[place for _, place in found],
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=arch.num_kv_heads // self.mesh.tp if arch.latent is None else 1,
            head_dim=arch.head_dim,
            dtype=dtype,
            device=device,
            cache_dtype=cache_dtype,
            has_values=arch.latent is None,
        )
        own = make_kernels(kernels, dtype=dtype, device=device)
        self.fallback_reason = own.fallback_reason
        sizes = AttentionSizes(
            block_size=block_size,
            num_blocks=self.cache.num_blocks,
            head_dim=arch.head_dim,
            dtype=dtype,
            device=device,
            cache_dtype=cache_dtype,
        )
        self.attentions = {
            window: make_backend(
                attention,
                own,
                replace(sizes, window=window),
                softcap=arch.attention_softcap,
                has_sinks=arch.attention_sinks,
                latent=arch.latent,
            )
            for window in dict.fromkeys(kind.window for kind in self.kinds)
        }
        self._kernels, self._ranks = own, groups
        self.decodes: DecodeLayers | None = None  # once the weights are packed
        build = LayerBuild(arch, groups, own, dtype)
        self.decoder = nn.ModuleList(
            DecoderLayer(build, kind, self.attentions[kind.window], formats.layers[i], whole_experts=whole_experts)
            for i, kind in zip(layers, self.kinds, strict=True)
        )
        turning = dict.fromkeys(map(rotation, self.kinds if arch.position == "rope" else ()))
        self.ropes: dict[LayerKind | None, RotaryEmbedding] = {
            kind: RotaryEmbedding(arch, kind, dtype=dtype, device=device) for kind in turning if kind is not None
        }
        # Models that scale the embeddings were trained with a factor of the weights' type.
        self._embedding_scale = torch.tensor(arch.embedding_scale, dtype=dtype).item()
        self.final_norm: nn.Module | None = None
        self.head: LMHead | None = None
        self.head_bias: nn.Parameter | None = None
        if self.mesh.is_last:
            self.final_norm = build.norm()
            self.head = LMHead(H, arch.vocab_size, dtype=dtype, groups=groups, format=formats.head)
            if arch.tie_embeddings and self.embedding is not None:
                assert isinstance(self.embedding, VocabParallelEmbedding), "the head holds a slice of the vocabulary"
                self.head.tie(self.embedding)
            if arch.head_bias:
                self.head_bias = nn.Parameter(torch.empty(arch.vocab_size, device=device))
        self.requires_grad_(False)
        self.eval()

    def pack(self) -> None:
        """Lay the loaded weights of linear layers out for the products of this device. They cannot be loaded again."""
        for module in self.modules():
            if isinstance(module, Packable | ExpertRouter | RoutedExperts):
                module.pack()
                huge_pages.give_back()
        layers: list[DecoderLayer] = list(self.decoder)  # type: ignore[arg-type]
        kinds = list(zip(self.kinds, self.groups, strict=True))
        self.decodes = find_decode_layers(layers, kinds, self.cache, self._kernels, self._ranks)

    @property
    def is_slow(self) -> bool:
        """Whether this stage's type is bfloat16, and its processor does not multiply that."""
        return self.device.type == "cpu" and self.dtype == torch.bfloat16 and not multiplies_bfloat16()

    @property
    def attention(self) -> AttentionBackend:
        """The backend of the first layer's attention."""
        return self.attentions[self.kinds[0].window]

    @property
    def runs_as_graphs(self) -> bool:
        """Whether CUDA graphs may hold what lies between two layers' attention.

        Latent attention has other buffers than theirs, and experts that are not held in bfloat16 wait for the device.
        """
        waits = any(isinstance(module, RoutedExperts) and module.waits for module in self.modules())
        return self.device.type == "cuda" and self.arch.latent is None and not waits

    @torch.inference_mode()
    def prepare(self, batch: RaggedBatch, sampled_R: Tensor | None = None) -> StageInputs:
        """Make what can be made of a micro-batch before the previous stage's activation arrives.

        It waits for nothing, so that several micro-batches may be prepared ahead, in another thread too. On CUDA it
        must run on the stream of `forward`.

        `sampled_R` are tokens on the device, on the first stage. A token id of -1 - r stands for the r-th of them, or
        for 0 where that one is `NO_TOKEN`.
        """
        at, tables, used = positions(batch), [batch, *batch.others], dict.fromkeys(self.groups)
        arrays = [at, *(slot_mapping(tables[group], self.cache.block_size) for group in used)]
        has_own_last = self.mesh.is_last and len(batch.sample_rows) < batch.num_tokens
        if self.mesh.is_first:
            arrays.append(batch.token_ids)
        if sampled_R is not None:
            rows = np.flatnonzero(batch.token_ids < 0)
            arrays += [rows, -1 - batch.token_ids[rows]]
        if has_own_last:
            arrays.append(batch.sample_rows)
        positions_T, *rest = upload(arrays, self.device)
        slots, rest = dict(zip(used, rest, strict=False)), rest[len(used) :]
        if sampled_R is not None:
            rest[0] = rest[0].index_copy(0, rest[1], sampled_R.index_select(0, rest[2]).clamp_(min=0))
        end = int(at.max()) + 1
        ropes = {kind: rope.at(positions_T, end) for kind, rope in self.ropes.items()}
        layers = list(zip(self.kinds, self.groups, strict=True))
        plans = {
            (window, group): self.attentions[window].plan(tables[group])
            for window, group in dict.fromkeys((kind.window, group) for kind, group in layers)
        }
        of_layer = {
            (kind, group): BatchContext(slots[group], ropes.get(rotation(kind)), plans[kind.window, group])
            for kind, group in dict.fromkeys(layers)
        }
        contexts = [of_layer[layer] for layer in layers]
        last_context = contexts[-1]
        if has_own_last:
            plan = self.attentions[self.kinds[-1].window].plan(tables[self.groups[-1]].sampled())
            last_context = replace(last_context, plan=plan, rows=rest[-1])
        token_ids = rest[0] if self.mesh.is_first else None
        return StageInputs(batch.num_tokens, token_ids, positions_T, contexts, last_context)

    @torch.inference_mode()
    def forward(self, inputs: StageInputs, hidden_TH: Tensor | None = None) -> Tensor:
        """Compute a micro-batch, and write its keys and values to the cache.

        The last layer of the last stage computes attention and feed-forward for the rows that sample alone.

        Args:
            inputs: the micro-batch's tables.
            hidden_TH: the activation from the previous stage, which may be written to; None on the first stage.

        Returns:
            The activation [T, H] for the next stage. On the last stage, the logits, float32, of this rank's share
            (`Mesh.share_of`) of the batch's `sample_rows`, [share, V].
        """
        return self.finish(*self.compute_layers(inputs, hidden_TH))

    def compute_layers(self, inputs: StageInputs, hidden_TH: Tensor | None = None) -> Parts:
        """Compute the embedding, on the first stage, and all layers, as `forward` does. The sum is their output."""
        assert (hidden_TH is None) == self.mesh.is_first, self.mesh
        first = self.embed(inputs.token_ids, inputs.positions) if hidden_TH is None else hidden_TH
        contexts = [*inputs.contexts[:-1], inputs.last_context]
        if self.decodes is not None and self.decodes.takes(inputs.num_tokens, contexts):
            return self.decodes.compute(first, contexts), None
        x_TH: Parts = first, None
        for layer, context, keys, values in zip(
            self.decoder, contexts, self.cache.keys, self.cache.values, strict=True
        ):
            x_TH = layer(x_TH, context, keys, values)
        return x_TH

    def embed(self, token_ids_T: Tensor | None, positions_T: Tensor) -> Tensor:
        """Return the first layer's input [T, H], on the first stage."""
        assert self.embedding is not None
        x_TH: Tensor = self.embedding(token_ids_T)
        if self._embedding_scale != 1.0:
            x_TH.mul_(self._embedding_scale)
        if self.position_embedding is not None:
            x_TH = x_TH + F.embedding(positions_T, self.position_embedding)
        return x_TH

    def finish(self, x_TH: Tensor, added_TH: Tensor | None = None) -> Tensor:
        """Return the last layer's output, x + added, or its logits, float32, on the last stage."""
        if self.head is None or self.final_norm is None:
            return x_TH if added_TH is None else x_TH.add_(added_TH)
        logits: Tensor = self.head(self.final_norm(x_TH, added_TH))
        if self.head_bias is not None:
            logits.add_(self.head_bias)
        if self.arch.logit_scale != 1.0:
            logits.mul_(self.arch.logit_scale)
        if (cap := self.arch.logit_softcap) is not None:
            logits.div_(cap).tanh_().mul_(cap)
        return logits
