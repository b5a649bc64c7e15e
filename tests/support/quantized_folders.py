"""Writes folders of quantized models: by the library compressed-tensors, or packed as a format's documents say.

Each model's weights become what its folder holds, so that `transformers` computes the truth.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationStrategy
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

Tensors = dict[str, torch.Tensor]
Pack = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]  # a layer's tensors, and the weight that they are

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the outputs in a word's nibbles, from the lowest


@dataclass(frozen=True)
class Kind:
    """A way to quantize: what config.json says of it, and what it makes of each linear layer."""

    config: dict[str, Any]
    pack: Pack
    skips: tuple[str, ...] = ("lm_head",)
    inputs: QuantizationArgs | None = None  # what the layers' inputs are rounded to by the library


def write(folder: Path, model: transformers.PreTrainedModel, kind: Kind, file: str | None = None) -> None:
    """Write a folder, and leave in the model the weights that it holds. `file` has the config, not config.json."""
    tensors: Tensors = {}
    linears = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    for name, parameter in model.state_dict().items():
        layer = name.removesuffix(".weight")
        if name not in linears or layer.endswith(kind.skips):
            tensors[name] = parameter
            continue
        parts, weight = kind.pack(layer, parameter)
        parameter.copy_(weight)
        if kind.inputs is not None:
            model.get_submodule(layer).register_forward_pre_hook(partial(_round_inputs, kind.inputs))
        tensors |= {f"{layer}.{part}": tensor.contiguous().clone() for part, tensor in parts.items()}
    folder.mkdir(exist_ok=True)
    model.config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors")
    if file is not None:
        (folder / file).write_text(json.dumps(kind.config))
        return
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": kind.config}))


def _round_inputs(args: QuantizationArgs, module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    return fake_quantize(inputs[0], *compute_dynamic_scales_and_zp(inputs[0], args, module), args)


def of_compressed_tensors(
    stored: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None, more: Tensors | None = None
) -> Kind:
    """Return a kind that the library itself writes, and reads for `transformers`."""
    args = QuantizationArgs(**weights)
    activations = None if inputs is None else QuantizationArgs(**inputs)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=activations, format=stored)
    compressor = BaseCompressor.get_value_from_registry(stored)

    def pack(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        low, high = extremes(weight, args)
        scale, zero = calculate_qparams(low, high, args)
        parts = compressor.compress({"weight": weight, "weight_scale": scale, "weight_zero_point": zero}, scheme)
        return parts | (more or {}), compressor.decompress(parts, scheme)["weight"].float()

    config = {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
    }
    return Kind(config, pack, inputs=activations if activations is not None and activations.dynamic else None)


def extremes(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least and the greatest number of all that share a scale."""
    rows, columns = weight.shape
    height, width = {
        QuantizationStrategy.TENSOR: (rows, columns),
        QuantizationStrategy.CHANNEL: (1, columns),
        QuantizationStrategy.GROUP: (1, args.group_size or 1),
        QuantizationStrategy.BLOCK: tuple(args.block_structure or (1, 1)),
    }[QuantizationStrategy(args.strategy)]
    padded = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
    blocks = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))
    low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    return (low.reshape(1), high.reshape(1)) if low.numel() == 1 else (low, high)


def rounded(
    weight: torch.Tensor, bits: int, group: int, symmetric: bool, order: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round a weight [out, in]. Return codes [in, out], scales and zeros [groups, out] and the numbers [out, in].

    `order` is each input's group; None: neighbours.
    """
    groups = torch.arange(weight.shape[1]) // group if order is None else order
    most, count = (1 << bits) - 1, int(groups.max()) + 1
    scales, zeros = torch.empty(count, len(weight)), torch.empty(count, len(weight), dtype=torch.int32)
    for g in range(count):
        part = weight[:, groups == g]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scales[g] = ((high - low) / most).half().float()
        zeros[g] = (1 << (bits - 1)) if symmetric else (-low / scales[g]).round().clamp(0, most).int()
    codes = ((weight.T / scales[groups]).round() + zeros[groups]).clamp(0, most).int()
    return codes, scales.half(), zeros, ((codes - zeros[groups]) * scales[groups]).T


def packed(codes: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack codes into words of 32 bits along a dimension, the first in the lowest bits, or in an order."""
    codes = codes.movedim(dim, -1).long()
    per_word = 32 // bits
    words = torch.zeros(*codes.shape[:-1], codes.shape[-1] // per_word, dtype=torch.int64)
    for place in range(per_word):
        words |= codes[..., (order[place] if order else place) :: per_word] << place * bits
    return words.to(torch.uint32).view(torch.int32).movedim(-1, dim)


def gptq(bits: int, group: int, *, symmetric: bool = True, act_order: bool = False, version: str = "gptq") -> Kind:
    """Return the method `gptq`, whose zeros are stored less 1, but in the format `gptq_v2`."""

    def pack(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        size = weight.shape[1] if group == -1 else group
        order = torch.arange(weight.shape[1]) // size
        if act_order:
            order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(len(name)))]
        codes, scales, zeros, numbers = rounded(weight, bits, size, symmetric, order)
        stored = (zeros - int(version == "gptq")) & ((1 << bits) - 1)
        parts = {"qweight": packed(codes, bits, 0), "qzeros": packed(stored, bits, 1), "scales": scales}
        return parts | {"g_idx": order.int()}, numbers

    config = {"bits": bits, "group_size": group, "desc_act": act_order, "sym": symmetric, "checkpoint_format": version}
    return Kind({"quant_method": "gptq", **config}, pack)


def awq(group: int) -> Kind:
    """Return the method `awq`, in its gemm layout."""

    def pack(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scales, zeros, numbers = rounded(weight, 4, group, symmetric=False)
        words, of_zeros = packed(codes, 4, 1, AWQ_ORDER), packed(zeros, 4, 1, AWQ_ORDER)
        return {"qweight": words, "qzeros": of_zeros, "scales": scales}, numbers

    config = {"bits": 4, "group_size": group, "zero_point": True, "version": "gemm", "modules_to_not_convert": None}
    return Kind({"quant_method": "awq", **config}, pack)


def fp8(block: tuple[int, int] | None, kept: tuple[str, ...] = ()) -> Kind:
    """Return the method `fp8`: E4M3 with a scale a block, or a tensor, which is called an inverse."""
    size = None if block is None else list(block)
    args = QuantizationArgs(num_bits=8, type="float", strategy="block" if size else "tensor", block_structure=size)

    def pack(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        low, high = extremes(weight, args)
        scale = torch.maximum(high, -low) / 448
        spread = scale if block is None else scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        spread = spread if block is None else spread[: len(weight), : weight.shape[1]]
        codes = (weight / spread).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale_inv": scale}, codes.float() * spread

    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": size}
    return Kind(config | {"modules_to_not_convert": list(kept)}, pack, ("lm_head", *kept))


def write_mxfp4(folder: Path, model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """Write a folder of gpt-oss with random experts of 4 bits, and return the model of the weights that it holds."""
    model.save_pretrained(folder / "numbers")
    numbers = load_file(folder / "numbers" / "model.safetensors")
    tensors: Tensors = dict(numbers)
    for name in [name for name in numbers if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(256, (count, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(122, 126, blocks.shape[:3], dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        numbers[name] = convert_moe_packed_tensors(blocks, scales).float()
    return _with_numbers(folder, tensors, numbers, {"quant_method": "mxfp4"})


def write_experts(folder: Path, model: transformers.PreTrainedModel, kind: Kind) -> transformers.PreTrainedModel:
    """Write a folder of a model of experts, and return the model of the weights that it holds.

    What routes tokens is left out, though no config says so, as in published ones.
    """
    model.save_pretrained(folder / "numbers")
    numbers = load_file(folder / "numbers" / "model.safetensors")
    tensors: Tensors = {}
    for name, weight in numbers.items():
        layer, _, part = name.rpartition(".")
        others = ("embed_tokens", "norm", "mlp.gate", "block_sparse_moe.gate", "shared_expert_gate", *kind.skips)
        if part != "weight" or layer.endswith(others):
            tensors[name] = weight
            continue
        parts, numbers[name] = kind.pack(layer, weight)
        tensors |= {f"{layer}.{part}": tensor.contiguous().clone() for part, tensor in parts.items()}
    return _with_numbers(folder, tensors, numbers, kind.config)


def _with_numbers(
    folder: Path, tensors: Tensors, numbers: Tensors, quantization: dict[str, Any]
) -> transformers.PreTrainedModel:
    """Write a folder of tensors, beside that of the numbers that they are, and return the latter's model."""
    save_file(tensors, folder / "model.safetensors")
    save_file({name: each.contiguous() for name, each in numbers.items()}, folder / "numbers" / "model.safetensors")
    config = json.loads((folder / "numbers" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    made = transformers.AutoModelForCausalLM.from_pretrained(folder / "numbers", dtype=torch.float32)
    return made.eval()
