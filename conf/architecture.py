"""Model architecture: the contents of `config.json` under uniform names, and per-layer differences."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from .errors import check
from .experts import ExpertsConfig
from .latent import LatentConfig
from .ranges import AT_LEAST_ONE, POSITIVE, Within, check_ranges

_KEY = "model.architecture"
_Size = Annotated[int, Within(1, (1 << 31) - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """RoPE scaling for longer contexts.

    `linear` divides all frequencies by one factor. `llama3` and `yarn` divide the low frequencies only and blend in
    between. `factors` divides each frequency by its own factor. `longrope` has one such list for models of up to
    `original_max_position` tokens (`model.max_model_len`) and another for longer ones. `yarn` and `longrope` also
    scale queries and keys.
    """

    type: Literal["linear", "llama3", "yarn", "longrope", "factors"]
    """how rotary frequencies stretch"""
    factor: float = 1.0
    """scaling factor"""
    low_freq_factor: float = 1.0
    """llama3: lower frequencies than this are divided by factor"""
    high_freq_factor: float = 4.0
    """llama3: higher frequencies than this are unchanged"""
    original_max_position: int = 8192
    """llama3, yarn, longrope: context length of the original training"""
    beta_fast: float = 32.0
    """yarn: frequencies with more rotations than this over that context are unchanged"""
    beta_slow: float = 1.0
    """yarn: frequencies with fewer rotations than this over that context are divided by factor"""
    truncate: bool = True
    """yarn: the blend starts and ends at whole elements"""
    attention_factor: float = 1.0
    """yarn, longrope: factor of cosines and sines"""
    factors: tuple[float, ...] = ()
    """factors, longrope: one factor per rotated pair of elements"""
    short_factors: tuple[float, ...] = ()
    """longrope: the same for models of up to original_max_position tokens"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """The settings in which layers of one model may differ."""

    window: Annotated[int | None, AT_LEAST_ONE] = None
    """sliding window: a token attends to itself and the window - 1 tokens before it; null: full attention"""
    rope: bool = True
    """apply rotary embeddings, if the model has them"""
    rope_theta: float = 10000.0
    """base of the rotary frequencies"""
    rope_scaling: RopeScaling | None = None
    """how rotary frequencies stretch"""
    experts: bool = True
    """MoE layer, if the model has experts; false: a dense feed-forward block of width ffn_size"""

    def __post_init__(self) -> None:
        check_ranges(self, f"{_KEY}.layers.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder-only transformer: the contents of `config.json` under uniform names.

    A layer adds attention and a feed-forward block to the residual stream. `norms` is the placement of its norms.
    `before` and `after`: before each block, or after it and before the addition. `both`: before and after. `parallel`:
    both blocks read the layer's input, each through its own norm. `shared`: both read it through one norm.
    """

    vocab_size: _Size
    """V, vocabulary size"""
    hidden_size: _Size
    """H, width of the residual stream"""
    num_layers: Annotated[int, Within(1, 100_000)]
    """decoder layers"""
    num_heads: _Size
    """N, query heads"""
    num_kv_heads: _Size
    """K, key and value heads; a divisor of num_heads"""
    head_dim: _Size
    """D, head dimension"""
    ffn_size: _Size
    """H2, inner width of the feed-forward block, and of each expert if experts.ffn_size is null"""
    max_position: _Size
    """L, longest sequence that the model supports"""
    family: str = "llama"
    """the model family, which determines the tensor names of a checkpoint (docs/models.md)"""
    norm: Literal["rms", "layer", "layer_scale", "layer_plain"] = "rms"
    """RMSNorm or LayerNorm; layer_scale: LayerNorm without bias (Cohere), layer_plain: without weight too (OLMo)"""
    norms: Literal["before", "after", "both", "parallel", "shared"] = "before"
    """norm placement: before or after each block, or both; parallel, shared: both blocks read the layer's input"""
    norm_eps: float = 1e-5
    """epsilon added to the variance"""
    position: Literal["rope", "learned"] = "rope"
    """rotary or learned positions"""
    rope_theta: float = 10000.0
    """base of the rotary frequencies"""
    rope_scaling: RopeScaling | None = None
    rotary_dim: int | None = None
    """leading elements of a head that are rotated; the others are not (Phi, GLM); null: all"""
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"] = "silu"
    """activation function of the feed-forward block; relu2: the square of relu (Nemotron)"""
    gated_ffn: bool = True
    """gated feed-forward (SwiGLU): a gate projection alongside the up projection"""
    qkv_bias: bool = False
    """bias on the query, key and value projections (Qwen2, GPT-2)"""
    attention_out_bias: bool = False
    """bias on attention's output projection"""
    ffn_bias: bool = False
    """bias on the feed-forward projections"""
    qk_norm: bool = False
    """RMSNorm over queries and keys (Qwen3)"""
    qk_norm_over: Literal["head", "width"] = "head"
    """qk_norm: over each head alone, or over all heads together (OLMo 2)"""
    attention_scale: Annotated[float | None, POSITIVE] = None
    """scale of the attention scores; null: head_dim ** -0.5"""
    attention_softcap: Annotated[float | None, POSITIVE] = None
    """attention logit soft-capping: scores s become cap * tanh(s / cap) (Gemma 2); null: none"""
    attention_sinks: bool = False
    """attention sinks: one learned logit per head in the softmax denominator (gpt-oss)"""
    sliding_window: Annotated[int | None, AT_LEAST_ONE] = None
    """sliding window of every layer (Mistral); null: full attention"""
    layers: tuple[LayerKind, ...] = ()
    """per-layer window, rotation and experts; empty: all have sliding_window, rope_theta and rope_scaling"""
    embedding_scale: Annotated[float, POSITIVE] = 1.0
    """factor of the token embeddings"""
    residual_scale: Annotated[float, POSITIVE] = 1.0
    """factor of the attention and feed-forward outputs (Granite)"""
    logit_scale: Annotated[float, POSITIVE] = 1.0
    """factor of the logits"""
    logit_softcap: Annotated[float | None, POSITIVE] = None
    """final logit soft-capping: cap * tanh(logit / cap) (Gemma 2); null: none"""
    tie_embeddings: bool = False
    """the LM head shares the embedding's weights"""
    head_bias: bool = False
    """bias on the logits (Phi)"""
    experts: ExpertsConfig | None = None  # replace the feed-forward blocks of layers whose kind has experts
    latent: LatentConfig | None = None  # MLA; null: plain multi-head or grouped-query attention. Sets head_dim
    bos_token_id: int | None = None
    """beginning-of-sequence token, which the tokenizer may prepend to a text prompt"""
    eos_token_ids: tuple[int, ...] = ()
    """end-of-sequence token ids"""

    def __post_init__(self) -> None:
        check_ranges(self, f"{_KEY}.")
        self._check("num_kv_heads", self.num_heads % self.num_kv_heads == 0, f"a divisor of num_heads={self.num_heads}")
        turned = self.rotary_dim
        is_part = turned is None or (1 < turned <= self.head_dim and turned % 2 == self.head_dim % 2 == 0)
        self._check(
            "rotary_dim", is_part, f"null or an even number up to head_dim={self.head_dim}, which must be even too"
        )
        if self.layers and len(self.layers) != self.num_layers:
            check(f"{_KEY}.layers", len(self.layers), False, f"empty or one per layer (num_layers={self.num_layers})")
        if self.experts is not None:
            self._check("activation", self.activation == "silu", "silu in an MoE model")
            self._check("gated_ffn", self.gated_ffn, "true in an MoE model")
        if self.latent is not None:
            cached = self.latent.cached
            self._check("head_dim", self.head_dim == cached, f"latent.rank + latent.rotary_dim = {cached}")
            self._check("num_kv_heads", self.num_kv_heads == 1, "1 with MLA, whose heads share one latent")

    def _check(self, name: str, holds: bool, right: str) -> None:
        value: Any = getattr(self, name)
        check(f"{_KEY}.{name}", value, holds, right)

    def kind(self, layer: int) -> LayerKind:
        """Return the kind of the layer with this index."""
        if self.layers:
            return self.layers[layer]
        return LayerKind(window=self.sliding_window, rope_theta=self.rope_theta, rope_scaling=self.rope_scaling)

    @property
    def kinds(self) -> dict[LayerKind, int]:
        """The number of layers of each kind, in order of first occurrence."""
        return dict(Counter(self.layers)) if self.layers else {self.kind(0): self.num_layers}

    @property
    def value_dim(self) -> int:
        """Value elements per query head."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def turned(self) -> int:
        """Rotated elements of a head."""
        return self.rotary_dim or (self.head_dim if self.latent is None else self.latent.rotary_dim)

    @property
    def expert_size(self) -> int:
        """Inner width of each expert."""
        return self.ffn_size if self.experts is None else self.experts.ffn_size or self.ffn_size

    @property
    def expert_layers(self) -> int:
        """Number of MoE layers."""
        return 0 if self.experts is None else sum(n for kind, n in self.kinds.items() if kind.experts)

    @property
    def layer_params(self) -> int:
        """Mean number of parameters of a decoder layer, without norms (under 0.1%)."""
        return sum(n * self.params_of(kind) for kind, n in self.kinds.items()) // self.num_layers

    def params_of(self, kind: LayerKind) -> int:
        """Return the number of parameters of a layer of this kind, without norms."""
        if self.experts is None or not kind.experts:
            return self.attention_params + self.ffn_params
        shared = self._ffn_matrices * self.hidden_size * self.experts.shared_ffn_size
        experts = self.experts.num_experts * self.expert_params
        return self.attention_params + self.router_params_of(kind) + experts + shared

    @property
    def attention_params(self) -> int:
        """Number of parameters of one layer's attention."""
        H, D, N, latent = self.hidden_size, self.head_dim, self.num_heads, self.latent
        if latent is None:
            return H * D * (N + 2 * self.num_kv_heads) + N * D * H
        per_head = (latent.query_rank or H) * latent.query_dim + latent.rank * (latent.head_dim + latent.value_dim)
        return self.replicated_attention_params + N * (per_head + latent.value_dim * H)

    @property
    def replicated_attention_params(self) -> int:
        """Number of attention parameters that are replicated on every tensor-parallel rank: MLA's down projections."""
        if self.latent is None:
            return 0
        return self.hidden_size * (self.latent.cached + (self.latent.query_rank or 0))

    @property
    def ffn_params(self) -> int:
        """Number of parameters of one feed-forward block."""
        return self._ffn_matrices * self.hidden_size * self.ffn_size

    @property
    def expert_params(self) -> int:
        """Number of parameters of one expert."""
        return 3 * self.hidden_size * self.expert_size

    def router_params_of(self, kind: LayerKind) -> int:
        """Return the number of router parameters of a layer of this kind; 0 without experts."""
        return self.hidden_size * self.experts.num_experts if self.experts is not None and kind.experts else 0

    @property
    def _ffn_matrices(self) -> int:
        return 3 if self.gated_ffn else 2

    @property
    def embedding_params(self) -> int:
        """Number of parameters of the token embedding; an untied LM head has the same number."""
        return self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        """Total number of parameters; a tied LM head is not counted again."""
        head = 0 if self.tie_embeddings else self.embedding_params
        learned = self.max_position * self.hidden_size if self.position == "learned" else 0
        layers = sum(n * self.params_of(kind) for kind, n in self.kinds.items())
        return layers + self.embedding_params + head + learned
