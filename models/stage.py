"""A pipeline stage: the embedding (first stage), decoder layers and their KV cache, norm and LM head (last stage)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..conf.architecture import LayerKind
from ..kernels import huge_pages
from ..kernels.operators.select import make_kernels
from ..kernels.processor import multiplies_bfloat16
from ..parallel.groups import Groups
from ..parallel.layers import LMHead, Packable, Parts, ReplicatedEmbedding, VocabParallelEmbedding
from .attention.backend import AttentionBackend, AttentionSizes
from .attention.select import make_backend
from .batch import RaggedBatch
from .batch_context import BatchContext
from .block_groups import places
from .decode_layers import DecodeLayers, find_decode_layers
from .decoder import DecoderLayer
from .experts.routed import RoutedExperts
from .kv_cache import KVCache, positions, slot_mapping
from .layer_build import LayerBuild
from .quantization.formats import ModelFormats, plain_formats
from .rope import RotaryEmbedding
from .stage_spec import StageSpec
from .transfers import upload


def rotation(kind: LayerKind) -> LayerKind | None:
    """Return the kind without its window, as key of its rotary embedding; None if it has no rotary embedding."""
    return replace(kind, window=None) if kind.rope else None


@dataclass(frozen=True, slots=True)
class StageInputs:
    """A micro-batch's inputs to a stage, other than the previous stage's activation, on the stage's device."""

    num_tokens: int
    token_ids: Tensor | None  # [T], on the first stage
    positions: Tensor  # [T]
    contexts: Sequence[BatchContext]  # by layer of the stage; layers of a kind and group share one
    last_context: BatchContext  # of the stage's last layer, which may compute fewer rows


class Stage(nn.Module):
    """This rank's shard of a stage: the layers of `spec`, and their KV cache.

    `formats` are those of the rank's quantized matrices; None: none are quantized.
    """

    def __init__(self, spec: StageSpec, groups: Groups, formats: ModelFormats | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.arch = arch = spec.arch
        self.mesh = groups.mesh
        self.layers = range(*spec.layers)
        self.device = groups.device
        assert spec.model.dtype != "auto", "the checkpoint knows it"
        self.dtype: torch.dtype = getattr(torch, spec.model.dtype)  # of the weights and the activations
        self.kinds = [arch.kind(layer) for layer in self.layers]
        self._ranks = groups
        self._kernels = make_kernels(spec.model.kernels, dtype=self.dtype, device=self.device)
        self.fallback_reason = self._kernels.fallback_reason
        self.decodes: DecodeLayers | None = None  # once the weights are packed
        build, formats = LayerBuild(arch, groups, self._kernels, self.dtype), formats or plain_formats(arch)
        self._add_embedding(formats)
        self._add_cache()
        self._add_attention()
        self.decoder = nn.ModuleList(
            DecoderLayer(build, kind, self.attentions[kind.window], formats.layers[i], whole_experts=spec.whole_experts)
            for i, kind in zip(self.layers, self.kinds, strict=True)
        )
        self._add_head(build, formats)
        self.requires_grad_(False)
        self.eval()

    def _add_embedding(self, formats: ModelFormats) -> None:
        """Make the embedding, and learned positions if the model has them, on the first stage."""
        arch, dtype, device = self.arch, self.dtype, self.device
        self.embedding: VocabParallelEmbedding | ReplicatedEmbedding | None = None
        self.position_embedding: nn.Parameter | None = None
        # Models with scaled embeddings were trained with the factor rounded to the weights' type.
        self._embedding_scale = torch.tensor(arch.embedding_scale, dtype=dtype).item()
        if not self.mesh.is_first:
            return
        kind = ReplicatedEmbedding if self.spec.replicate_embedding else VocabParallelEmbedding
        H, groups, format = arch.hidden_size, self._ranks, formats.embedding
        self.embedding = kind(arch.vocab_size, H, dtype=dtype, groups=groups, format=format)
        if arch.position == "learned":
            self.position_embedding = nn.Parameter(torch.empty(arch.max_position, H, dtype=dtype, device=device))

    def _add_cache(self) -> None:
        """Allocate the KV cache, and find the layer group and the place in its blocks of each layer."""
        spec, arch = self.spec, self.arch
        found = places([kind.window for kind in self.kinds], spec.windows)
        self.groups = [group for group, _ in found]  # by layer
        self.cache = KVCache(
            places=[place for _, place in found],
            num_blocks=spec.num_blocks,
            block_size=spec.block_size,
            num_kv_heads=arch.num_kv_heads // self.mesh.tp if arch.latent is None else 1,
            head_dim=arch.head_dim,
            dtype=self.dtype,
            device=self.device,
            cache_dtype=spec.cache_dtype,
            has_values=arch.latent is None,
        )

    def _add_attention(self) -> None:
        """Make a backend for each attention window, and a rotary embedding for each kind of layer."""
        spec, arch = self.spec, self.arch
        sizes = AttentionSizes(
            block_size=spec.block_size,
            num_blocks=self.cache.num_blocks,
            head_dim=arch.head_dim,
            dtype=self.dtype,
            device=self.device,
            cache_dtype=spec.cache_dtype,
        )
        self.attentions = {
            window: make_backend(
                spec.model.attention,
                self._kernels,
                replace(sizes, window=window),
                softcap=arch.attention_softcap,
                has_sinks=arch.attention_sinks,
                latent=arch.latent,
            )
            for window in dict.fromkeys(kind.window for kind in self.kinds)
        }
        turning = dict.fromkeys(map(rotation, self.kinds if arch.position == "rope" else ()))
        self.ropes: dict[LayerKind | None, RotaryEmbedding] = {
            kind: RotaryEmbedding(arch, kind, dtype=self.dtype, device=self.device)
            for kind in turning
            if kind is not None
        }

    def _add_head(self, build: LayerBuild, formats: ModelFormats) -> None:
        """Make the final norm and the LM head, on the last stage."""
        arch = self.arch
        self.final_norm: nn.Module | None = None
        self.head: LMHead | None = None
        self.head_bias: nn.Parameter | None = None
        if not self.mesh.is_last:
            return
        self.final_norm = build.norm()
        H, groups, format = arch.hidden_size, self._ranks, formats.head
        self.head = LMHead(H, arch.vocab_size, dtype=self.dtype, groups=groups, format=format)
        if arch.tie_embeddings and self.embedding is not None:
            assert isinstance(self.embedding, VocabParallelEmbedding), "the head holds a slice of the vocabulary"
            self.head.tie(self.embedding)
        if arch.head_bias:
            self.head_bias = nn.Parameter(torch.empty(arch.vocab_size, device=self.device))

    def pack(self) -> None:
        """Pack the loaded weights for this device's GEMMs. They cannot be loaded again."""
        for module in self.modules():
            if isinstance(module, Packable | RoutedExperts):
                module.pack()
                huge_pages.give_back()
        layers: list[DecoderLayer] = list(self.decoder)  # type: ignore[arg-type]
        kinds = list(zip(self.kinds, self.groups, strict=True))
        self.decodes = find_decode_layers(layers, kinds, self.cache, self._kernels, self._ranks)

    @property
    def is_slow(self) -> bool:
        """Whether this stage computes in bfloat16 on a processor without bfloat16 instructions."""
        return self.device.type == "cpu" and self.dtype == torch.bfloat16 and not multiplies_bfloat16()

    @property
    def attention(self) -> AttentionBackend:
        """The first layer's attention backend."""
        return self.attentions[self.kinds[0].window]

    @property
    def runs_as_graphs(self) -> bool:
        """Whether the stage can run as CUDA graphs.

        Not with MLA, whose buffers differ, nor with experts in types other than bfloat16, which synchronize.
        """
        waits = any(isinstance(module, RoutedExperts) and module.waits for module in self.modules())
        return self.device.type == "cuda" and self.arch.latent is None and not waits

    @torch.inference_mode()
    def prepare(self, batch: RaggedBatch, sampled_R: Tensor | None = None) -> StageInputs:
        """Prepare a micro-batch before the previous stage's activation arrives.

        Does not synchronize, so that several micro-batches can be prepared ahead, also in another thread. On CUDA it
        must run on the stream of `forward`.

        `sampled_R`: tokens on the device, on the first stage. A token id of -1 - r is a placeholder for the r-th of
        them; `NO_TOKEN` is replaced by 0.
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

        The last layer of the last stage computes attention and feed-forward only for `sample_rows`.

        Args:
            inputs: from `prepare`.
            hidden_TH: the activation from the previous stage, which may be modified; None on the first stage.

        Returns:
            The activation [T, H] for the next stage. On the last stage, the logits, float32, of this rank's share
            (`Mesh.share_of`) of the batch's `sample_rows`, [share, V].
        """
        return self.finish(*self.compute_layers(inputs, hidden_TH))

    def compute_layers(self, inputs: StageInputs, hidden_TH: Tensor | None = None) -> Parts:
        """Compute the embedding (first stage) and all layers. The output is the sum of (residual, hidden)."""
        assert (hidden_TH is None) == self.mesh.is_first, self.mesh
        first = self.embed(inputs.token_ids, inputs.positions) if hidden_TH is None else hidden_TH
        contexts = [*inputs.contexts[:-1], inputs.last_context]
        if self.decodes is not None and self.decodes.takes(inputs.num_tokens, contexts):
            return self.decodes.compute(first, contexts), None
        residual, hidden = first, None
        for layer, context, keys, values in zip(
            self.decoder, contexts, self.cache.keys, self.cache.values, strict=True
        ):
            residual, hidden = layer(residual, hidden, context, keys, values)
        return residual, hidden

    def embed(self, token_ids_T: Tensor | None, positions_T: Tensor) -> Tensor:
        """Return the first layer's input [T, H], on the first stage."""
        assert self.embedding is not None
        x_TH: Tensor = self.embedding(token_ids_T)
        if self._embedding_scale != 1.0:
            x_TH.mul_(self._embedding_scale)
        if self.position_embedding is not None:
            x_TH = x_TH + F.embedding(positions_T, self.position_embedding)
        return x_TH

    def finish(self, residual_TH: Tensor, hidden_TH: Tensor | None = None) -> Tensor:
        """Return the last layer's output, the sum of both; on the last stage its logits, float32."""
        if self.head is None or self.final_norm is None:
            return residual_TH if hidden_TH is None else residual_TH.add_(hidden_TH)
        logits: Tensor = self.head(self.final_norm(residual_TH, hidden_TH))
        if self.head_bias is not None:
            logits.add_(self.head_bias)
        if self.arch.logit_scale != 1.0:
            logits.mul_(self.arch.logit_scale)
        if (cap := self.arch.logit_softcap) is not None:
            logits.div_(cap).tanh_().mul_(cap)
        return logits
