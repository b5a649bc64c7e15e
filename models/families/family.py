"""What a model family is made of. A file beside this one has one family each, or several that are alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..model_config import ModelValues
from ..names import LLAMA, Names

Reader = Callable[[ModelValues], dict[str, Any]]

# The keys of a config.json that decide a tensor's presence or shape, by field of the architecture.
KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim or num_attention_heads",
    "ffn_size": "intermediate_size",
    "max_position": "max_position_embeddings",
    "qkv_bias": "attention_bias",
    "attention_out_bias": "attention_bias",
    "ffn_bias": "mlp_bias",
    "tie_embeddings": "tie_word_embeddings",
}
EXPERT_KEYS = KEYS | {
    "experts.num_experts": "n_routed_experts or num_experts",
    "experts.ffn_size": "moe_intermediate_size",
    "experts.shared_ffn_size": "n_shared_experts",
    "layers": "first_k_dense_replace",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of models whose checkpoints share tensor names: how config.json is read, and what is refused.

    Attributes:
        name: `model.architecture.family`.
        readers: by `model_type` of config.json: the name in its `architectures`, and what reads the fields of an
            `Architecture` from it.
        names: of the tensors.
        keys: of config.json, by field of the architecture, that decide tensors.
        about: which published models these are, for docs/models.md.
        refused: what of them is not computed, for docs/models.md.
        text_of: the `model_type`, by name in `architectures`, of models whose text model (`text_config`) is of these.
    """

    name: str
    readers: Mapping[str, tuple[str, Reader]] = field(default_factory=dict)
    names: Names = LLAMA
    keys: Mapping[str, str] = field(default_factory=lambda: KEYS)
    about: str
    refused: str = ""
    text_of: Mapping[str, str] = field(default_factory=dict)
