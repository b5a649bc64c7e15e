"""The model families that are computed: for each a reader of its config.json and its tensors' names.

The readers go by the rules of transformers 5. A feature that this package does not compute exactly is refused by name.
"""

from __future__ import annotations

from .deepseek import DEEPSEEK
from .family import Family, Reader
from .gpt2 import GPT2
from .llama import LLAMA
from .mistral import MISTRAL, MIXTRAL
from .qwen import QWEN2, QWEN3, QWEN_MOE

FAMILIES: dict[str, Family] = {
    each.name: each for each in (LLAMA, MISTRAL, QWEN2, QWEN3, GPT2, MIXTRAL, QWEN_MOE, DEEPSEEK)
}
READERS: dict[str, tuple[Family, Reader]] = {
    name: (family, reader) for family in FAMILIES.values() for name, reader in family.readers.items()
}
NAME_BY_MODEL_TYPE = {kind: name for family in FAMILIES.values() for kind, name in family.model_types.items()}
NOT_MODELLED = {
    "GptOssForCausalLM": "experts with biases and a gate of their own",
    "Qwen3NextForCausalLM": "linear attention, which needs a state for each request beside the KV cache",
}
