"""Definition of a model family. Each other module here has one family, or several similar ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from ...conf.architecture import Architecture
from ..model_config import ModelValues
from ..names import LLAMA, Names

Reader = Callable[[ModelValues], Architecture]

# The config.json keys that determine a tensor's presence or shape, by architecture field.
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
        readers: by `model_type` of config.json: the name in its `architectures`, and the reader.
        variants: further families that its readers may return.
        names: tensor names.
        keys: config.json keys that determine tensors, by architecture field.
        text_of: `model_type` by name in `architectures`, for multimodal models with a text model of this family
            (`text_config`).
    """

    name: str
    readers: Mapping[str, tuple[str, Reader]] = field(default_factory=dict)
    variants: Collection[str] = ()
    names: Names = LLAMA
    keys: Mapping[str, str] = field(default_factory=lambda: KEYS)
    text_of: Mapping[str, str] = field(default_factory=dict)
