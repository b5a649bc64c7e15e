"""The shape of a model: the contents of `config.json` under one set of names, and what sets its layers apart."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from .errors import check
from .experts import ExpertsConfig
from .latent import LatentConfig

_KEY = "model.architecture"
_MAX_LAYERS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """A stretch of the rotary frequencies.

    `linear` divides all by one factor, `llama3` and `yarn` the slow ones, with a blend between, `factors` each by its
    own. `longrope` has such factors for models of up to `original_max_position` tokens (`model.max_model_len`), and
    others for longer ones. `yarn` and `longrope` scale queries and keys too.
    """

    type: Literal["linear", "llama3", "yarn", "longrope", "factors"]
    """how rotary frequencies stretch"""
    factor: float = 1.0
    """factor by which they stretch"""
    low_freq_factor: float = 1.0
    """llama3: slower frequencies than this are divided by factor"""
    high_freq_factor: float = 4.0
    """llama3: faster frequencies than this stay"""
    original_max_position: int = 8192
    """llama3, yarn, longrope: context length of the training before the stretch"""
    beta_fast: float = 32.0
    """yarn: frequencies that turn more often than this in that context stay"""
    beta_slow: float = 1.0
    """yarn: frequencies that turn less often than this in that context are divided by factor"""
    truncate: bool = True
    """yarn: the blend begins and ends at whole elements"""
    attention_factor: float = 1.0
    """yarn, longrope: cosines and sines are multiplied by it"""
    factors: tuple[float, ...] = ()
    """factors, longrope: one for each pair of elements that turns"""
    short_factors: tuple[float, ...] = ()
    """longrope: the same for models of up to original_max_position tokens"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """What may set a layer apart from the others of its model."""

    window: int | None = None
    """a token sees itself and the window - 1 before it; null: all"""
    rope: bool = True
    """queries and keys turn with their position, where the model's do"""
    rope_theta: float = 10000.0
    """base of the rotary frequencies"""
    rope_scaling: RopeScaling | None = None
    """how rotary frequencies stretch"""
    experts: bool = True
    """the layer has the model's experts, where there are some; false: a feed-forward block of width ffn_size"""

    def __post_init__(self) -> None:
        check(f"{_KEY}.layers.window", self.window, self.window is None or self.window >= 1, "null or 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The shape of a decoder-only transformer: the contents of `config.json` under one set of names.

    A layer adds attention and a feed-forward block to its input. `norms` says where its norms stand. `before` and
    `after`: before each of the two, or after it, before it is added. `both`: before and after. `parallel`: both blocks
    read the layer's input, each by its own norm. `shared`: both read it by one norm.
    """

    vocab_size: int
    """V, tokens of the vocabulary"""
    hidden_size: int
    """H, width of the residual stream"""
    num_layers: int
    """decoder layers"""
    num_heads: int
    """N, query heads"""
    num_kv_heads: int
    """K, key and value heads; a divisor of num_heads"""
    head_dim: int
    """D, size of a head"""
    ffn_size: int
    """H2, inner width of the feed-forward block, and of each expert unless experts.ffn_size says another"""
    max_position: int
    """L, longest sequence that the model supports"""
    family: str = "llama"
    """the model family whose names a checkpoint's tensors have (docs/models.md)"""
    norm: Literal["rms", "layer", "layer_scale", "layer_plain"] = "rms"
    """RMSNorm or LayerNorm; layer_scale: LayerNorm without bias (Cohere), layer_plain: without weight too (OLMo)"""
    norms: Literal["before", "after", "both", "parallel", "shared"] = "before"
    """where norms stand: before attention and feed-forward, after, both; parallel, shared: both read one input"""
    norm_eps: float = 1e-5
    """added to the variance"""
    position: Literal["rope", "learned"] = "rope"
    """rotary or learned positions"""
    rope_theta: float = 10000.0
    """base of the rotary frequencies"""
    rope_scaling: RopeScaling | None = None
    rotary_dim: int | None = None
    """elements of a head that turn, its first; the others stay (Phi, GLM); null: all"""
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"] = "silu"
    """activation function of the feed-forward block; relu2: the square of relu (Nemotron)"""
    gated_ffn: bool = True
    """a gate beside the up projection (SwiGLU)"""
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
    attention_scale: float | None = None
    """factor of the attention scores; null: head_dim ** -0.5"""
    attention_softcap: float | None = None
    """attention scores s become cap * tanh(s / cap) (Gemma 2); null: they stay"""
    attention_sinks: bool = False
    """a learned score of each head takes a share of its attention and gives nothing (gpt-oss)"""
    sliding_window: int | None = None
    """a token sees itself and the window - 1 before it (Mistral); null: all"""
    layers: tuple[LayerKind, ...] = ()
    """what sets each layer apart: window, rotation; empty: all have sliding_window, rope_theta and rope_scaling"""
    embedding_scale: float = 1.0
    """factor of the token embeddings"""
    residual_scale: float = 1.0
    """factor of what attention and feed-forward add (Granite)"""
    logit_scale: float = 1.0
    """factor of the logits"""
    logit_softcap: float | None = None
    """logits become cap * tanh(logit / cap) (Gemma 2); null: they stay"""
    tie_embeddings: bool = False
    """the head shares the embedding's weights"""
    head_bias: bool = False
    """bias on the logits (Phi)"""
    experts: ExpertsConfig | None = None  # in place of feed-forward blocks, unless `layers` say otherwise
    latent: LatentConfig | None = None  # of attention; null: keys and values of their own. It sets head_dim
    bos_token_id: int | None = None
    """token put before a text prompt, where the tokenizer does so"""
    eos_token_ids: tuple[int, ...] = ()
    """token ids that end a sequence"""

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "ffn_size",
            "max_position",
        ):
            most = _MAX_LAYERS if name == "num_layers" else (1 << 31) - 1
            self._check(name, 1 <= getattr(self, name) <= most, f"1 to {most}")
        self._check("num_kv_heads", self.num_heads % self.num_kv_heads == 0, f"a divisor of num_heads={self.num_heads}")
        self._check("sliding_window", self.sliding_window is None or self.sliding_window >= 1, "null or 1 or more")
        turned = self.rotary_dim
        is_part = turned is None or (1 < turned <= self.head_dim and turned % 2 == self.head_dim % 2 == 0)
        self._check("rotary_dim", is_part, f"null or an even number up to head_dim={self.head_dim}, which is even too")
        for name in ("attention_scale", "attention_softcap", "logit_softcap"):
            self._check(name, getattr(self, name) is None or getattr(self, name) > 0, "null or above 0")
        for name in ("embedding_scale", "residual_scale", "logit_scale"):
            self._check(name, getattr(self, name) > 0, "above 0")
        if self.layers and len(self.layers) != self.num_layers:
            check(f"{_KEY}.layers", len(self.layers), False, f"empty or one for each of num_layers={self.num_layers}")
        if self.experts is not None:
            self._check("activation", self.activation == "silu", "silu in a model of experts")
            self._check("gated_ffn", self.gated_ffn, "true in a model of experts")
        if self.latent is not None:
            cached = self.latent.cached
            self._check("head_dim", self.head_dim == cached, f"latent.rank + latent.rotary_dim = {cached}")
            self._check("num_kv_heads", self.num_kv_heads == 1, "1, the latent that all heads share")

    def _check(self, name: str, holds: bool, right: str) -> None:
        value: Any = getattr(self, name)
        check(f"{_KEY}.{name}", value, holds, right)

    def kind(self, layer: int) -> LayerKind:
        """Return what sets the layer of that index apart."""
        if self.layers:
            return self.layers[layer]
        return LayerKind(window=self.sliding_window, rope_theta=self.rope_theta, rope_scaling=self.rope_scaling)

    @property
    def kinds(self) -> dict[LayerKind, int]:
        """How many layers there are of each kind, in the order of their first layers."""
        return dict(Counter(self.layers)) if self.layers else {self.kind(0): self.num_layers}

    @property
    def value_dim(self) -> int:
        """Elements of what a query head attends to."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def turned(self) -> int:
        """Elements of a head that turn with its position."""
        return self.rotary_dim or (self.head_dim if self.latent is None else self.latent.rotary_dim)

    @property
    def expert_size(self) -> int:
        """Inner width of each expert."""
        return self.ffn_size if self.experts is None else self.experts.ffn_size or self.ffn_size

    @property
    def expert_layers(self) -> int:
        """Number of layers that have experts."""
        return 0 if self.experts is None else sum(n for kind, n in self.kinds.items() if kind.experts)

    @property
    def layer_params(self) -> int:
        """Number of parameters of one decoder layer, without norms (under 0.1%), in the mean over all layers."""
        return sum(n * self.params_of(kind) for kind, n in self.kinds.items()) // self.num_layers

    def params_of(self, kind: LayerKind) -> int:
        """Return the number of parameters of a layer of a kind, without norms."""
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
        """Number of those that every tensor-parallel rank holds whole: the projections to latents."""
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
        """Return the number of parameters of the router of a layer of a kind; 0 without experts."""
        return self.hidden_size * self.experts.num_experts if self.experts is not None and kind.experts else 0

    @property
    def _ffn_matrices(self) -> int:
        return 3 if self.gated_ffn else 2

    @property
    def embedding_params(self) -> int:
        """Number of parameters of the token embedding; an LM head that is not tied has as many again."""
        return self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        """The number of all weights; an LM head that is tied to the embedding counts once."""
        head = 0 if self.tie_embeddings else self.embedding_params
        learned = self.max_position * self.hidden_size if self.position == "learned" else 0
        layers = sum(n * self.params_of(kind) for kind, n in self.kinds.items())
        return layers + self.embedding_params + head + learned
