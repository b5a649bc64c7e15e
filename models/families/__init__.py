"""Supported model families: for each, a reader of its config.json and its tensor names.

The readers follow transformers 5. A feature that this package cannot compute exactly is rejected by name.
"""

from __future__ import annotations

from .cohere import COHERE
from .deepseek import DEEPSEEK, DOTS1
from .ernie import ERNIE, ERNIE_MOE
from .falcon import FALCON, FALCON2, GPT_NEOX
from .family import Family, Reader
from .gemma import GEMMA2, GEMMA3
from .glm import GLM, GLM4, GLM4_MOE
from .gpt2 import GPT2
from .gpt_oss import GPT_OSS
from .granite import GRANITE, GRANITE_MOE, MINICPM
from .llama import ARCEE, INTERNLM2, LLAMA, SEED_OSS, SMOLLM3
from .minimax import MINIMAX_M2
from .mistral import MISTRAL, MIXTRAL
from .olmo import EXAONE4, OLMO, OLMO2, OLMOE
from .phi import PHI, PHI3
from .qwen import QWEN2, QWEN3, QWEN_MOE
from .stablelm import NEMOTRON, STABLELM
from .starcoder2 import STARCODER2

FAMILIES: dict[str, Family] = {
    each.name: each
    for each in (
        *(LLAMA, MISTRAL, QWEN2, QWEN3, GPT2, GEMMA2, GEMMA3, PHI3, OLMO2, GRANITE, SMOLLM3, STABLELM, GLM, GLM4),
        *(GPT_NEOX, FALCON, FALCON2, INTERNLM2, MINICPM, MIXTRAL, QWEN_MOE, DEEPSEEK),
        *(GLM4_MOE, MINIMAX_M2, GPT_OSS, SEED_OSS, ERNIE, COHERE, STARCODER2, EXAONE4, NEMOTRON, OLMO, OLMOE, ARCEE),
        *(DOTS1, ERNIE_MOE, GRANITE_MOE, PHI),
    )
}
READERS: dict[str, tuple[Family, Reader]] = {
    name: (family, reader) for family in FAMILIES.values() for name, reader in family.readers.values()
}
NAME_BY_MODEL_TYPE = {kind: name for family in FAMILIES.values() for kind, (name, _) in family.readers.items()}
TEXT_MODELS = {name: kind for family in FAMILIES.values() for name, kind in family.text_of.items()}
NOT_MODELLED = {
    "Qwen3NextForCausalLM": "linear attention, which needs a per-request state in addition to the KV cache",
    "HunYuanDenseV1ForCausalLM": "QK norm after RoPE",
    "HunYuanMoEV1ForCausalLM": "QK norm after RoPE",
    "BloomForCausalLM": "ALiBi, and a norm of the embeddings",
    "GPTJForCausalLM": "a reader of its config keys; all needed fields exist",
    "OPTForCausalLM": "learned positions with an offset of 2",
}
