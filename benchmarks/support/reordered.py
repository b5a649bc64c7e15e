"""Writes SmolLM2-135M as a bfloat16 folder with permuted channels; outputs are the same."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from gapless.conf.architecture import Architecture
from gapless.conf.schema import ModelConfig
from gapless.models.checkpoint import Checkpoint
from gapless.models.gguf.config import config_values
from gapless.models.gguf.file import open_gguf
from gapless.models.gguf.smollm2 import smollm2
from gapless.models.layout import names_of, tensor_shapes


def write_reordered(folder: Path) -> Path:
    """Write the model and return the folder. Its quantization groups differ from those of the GGUF file."""
    file = smollm2()
    arch = Checkpoint.open(ModelConfig(weights=str(file))).arch
    source, names = Checkpoint.open(ModelConfig(weights=str(file))).tensors(arch), names_of(arch)
    generator = torch.Generator().manual_seed(0)
    hidden, inner = (torch.randperm(n, generator=generator) for n in (arch.hidden_size, arch.ffn_size))
    of_values, of_outputs = _head_orders(arch)
    tensors = {}
    for name, shape in tensor_shapes(arch).items():
        tensor = source.read(name, slice(0, shape[0]), slice(0, shape[1]) if len(shape) == 2 else None)
        part = name.removesuffix(".weight").rsplit(".", 1)[-1]
        if part in ("up_proj", "gate_proj"):
            tensor = tensor[inner]
        elif part == "down_proj":
            tensor = tensor[:, inner]
        elif part == "v_proj":
            tensor = tensor[of_values]
        elif part == "o_proj":
            tensor = tensor[:, of_outputs]
        tensor = tensor[hidden] if part in ("down_proj", "o_proj") else tensor[..., hidden]
        tensors[name] = tensor.bfloat16().contiguous()
    assert names.head not in tensors, "tied"
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_values(open_gguf(file)) | {"model_type": "llama"}))
    return folder


def _head_orders(arch: Architecture) -> tuple[torch.Tensor, torch.Tensor]:
    """Return permutations within heads: of the V rows, and of the output projection's columns."""
    D, K = arch.head_dim, arch.num_kv_heads
    within = torch.stack([torch.randperm(D, generator=torch.Generator().manual_seed(k)) for k in range(K)])
    of_heads = within.repeat_interleave(arch.num_heads // K, dim=0)
    return tuple((each + D * torch.arange(len(each))[:, None]).flatten() for each in (within, of_heads))
