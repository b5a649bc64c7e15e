"""The names and layouts of a checkpoint's tensors. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentNames:
    """The tensor names of MLA."""

    query: str = "self_attn.q_proj"  # without a query rank
    query_down: str = "self_attn.q_a_proj"
    query_norm: str = "self_attn.q_a_layernorm.weight"
    query_up: str = "self_attn.q_b_proj"
    down: str = "self_attn.kv_a_proj_with_mqa"
    norm: str = "self_attn.kv_a_layernorm.weight"
    up: str = "self_attn.kv_b_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The tensor names of a family of checkpoints.

    Equal names mean that one tensor contains the parts concatenated by rows: q, k and v, or gate and up. An empty name
    means that no model of the family has this tensor.
    """

    embedding: str
    positions: str = "model.embed_positions.weight"
    layer: str  # prefix of a layer's tensors, with {} for the layer's number
    attention_norm: str = ""  # before attention
    attention_norm_after: str = ""
    q: str
    k: str
    v: str
    attention_out: str
    q_norm: str = ""
    k_norm: str = ""
    sinks: str = ""
    ffn_norm: str = ""  # before the feed-forward block
    ffn_norm_after: str = ""
    gate: str = ""
    up: str
    down: str
    router: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"
    expert: str = "mlp.experts.{}."  # prefix of an expert's tensors, with {} for its index; empty: see the names below
    expert_gate: str = "gate_proj"
    expert_up: str = "up_proj"
    expert_down: str = "down_proj"
    fused_experts: str = ""  # prefix of tensors of all experts of a layer, stored as [in, out], gate and up interleaved
    shared: str = "mlp.shared_experts."  # prefix of the shared expert's tensors
    shared_gate: str = "mlp.shared_expert_gate.weight"
    latent: LatentNames = LatentNames()
    final_norm: str
    head: str = "lm_head.weight"
    transposed: bool = False  # linear weights are stored as [in, out]
    grouped: bool = False  # the fused q, k and v tensor is ordered by KV group: queries, key, value
    neighbours_turn: bool = False  # rotary pairs are elements 2 i and 2 i + 1 of a head (GPT-J), not i and i + D / 2
    further_layers: bool = False  # there may be multi-token-prediction (MTP) layers after the model's
    norm_offset: float = 0.0  # to add to the checkpoint's norm weights (Gemma)

    @property
    def head_bias(self) -> str:
        """The bias of the logits."""
        return self.head.removesuffix("weight") + "bias"

    @property
    def of_shared(self) -> tuple[str, str, str]:
        """The shared expert's gate, up and down projection."""
        return self.shared + self.expert_gate, self.shared + self.expert_up, self.shared + self.expert_down

    def of_expert(self, e: int) -> tuple[str, str, str]:
        """Return an expert's gate, up and down projection."""
        gate, up, down = ((self.expert + own).format(e) for own in (self.expert_gate, self.expert_up, self.expert_down))
        return gate, up, down


def weight_of(name: str) -> str:
    """Return the name of a projection's weight. `NAME[3]`, an index into a tensor, already is a weight."""
    return name if name.endswith("]") else f"{name}.weight"


LLAMA = Names(
    embedding="model.embed_tokens.weight",
    layer="model.layers.{}.",
    attention_norm="input_layernorm",
    q="self_attn.q_proj",
    k="self_attn.k_proj",
    v="self_attn.v_proj",
    attention_out="self_attn.o_proj",
    q_norm="self_attn.q_norm.weight",
    k_norm="self_attn.k_norm.weight",
    ffn_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    final_norm="model.norm",
)
