"""What is wrong with a quantized folder is said in one line, with the tensor or the key, before anything starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from gapless.conf.errors import ConfigError
from gapless.conf.schema import ModelConfig
from gapless.kernels.weight_format import WeightFormat
from gapless.models.checkpoint import Checkpoint
from gapless.models.layout import tensor_shapes
from gapless.models.quantization.formats import cut_too_small, model_formats
from tests.models.test_quantized_folders import CONFIG, FP8, INT4, INT8
from tests.support.quantized_folders import Kind, Tensors, awq, fp8, gptq, of_compressed_tensors, write

DOWN = "model.layers.1.mlp.down_proj"
PACKED = of_compressed_tensors("pack-quantized", INT4 | {"symmetric": False})
Change = Callable[[dict[str, Any], Tensors], None]  # of the config and the tensors


def made(folder: Path, kind: Kind, change: Change = lambda config, tensors: None) -> None:
    """Write a folder of two layers, changed."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG | {"num_hidden_layers": 2}))
    with torch.no_grad():
        write(folder, model, kind)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


def checked(folder: Path) -> None:
    arch = Checkpoint.open(ModelConfig(weights=str(folder))).arch
    Checkpoint.open(ModelConfig(weights=str(folder))).tensors(arch).check(arch, tensor_shapes(arch))


def says(**values: Any) -> Change:
    return lambda config, tensors: config["quantization_config"].update(values)


def group_says(part: str, **values: Any) -> Change:
    return lambda config, tensors: config["quantization_config"]["config_groups"]["group_0"][part].update(values)


def has(name: str, tensor: torch.Tensor | None) -> Change:
    def change(config: dict[str, Any], tensors: Tensors) -> None:
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor

    return change


def without_config(config: dict[str, Any], tensors: Tensors) -> None:
    del config["quantization_config"]


def words(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


REFUSED: dict[str, tuple[Kind, Change, str]] = {
    "no config": (PACKED, without_config, "is quantized, but config.json has no quantization_config"),
    "fp8 without config": (
        fp8(None),
        without_config,
        "is quantized, but config.json has no quantization_config",
    ),
    "bitsandbytes": (
        gptq(4, 32),
        says(quant_method="bitsandbytes"),
        "quant_method='bitsandbytes' is not supported; supported: compressed-tensors, gptq, awq, fp8, mxfp4, and GGUF",
    ),
    "no method": (gptq(4, 32), says(quant_method=None), "quant_method='' is not supported"),
    "mxfp4": (gptq(4, 32), says(quant_method="mxfp4"), "quant_method='mxfp4' is not supported outside of gpt-oss"),
    "bits": (gptq(4, 32), says(bits=3), "quantization_config.bits=3: must be 4 or 8"),
    "marlin": (gptq(4, 32), says(is_marlin_format=True), "is_marlin_format is not supported"),
    "layout": (gptq(4, 32), says(checkpoint_format="gptq_p"), "must be gptq or gptq_v2"),
    "gemv": (awq(32), says(version="gemv"), "quantization_config.version=gemv"),
    "zero points": (awq(32), says(zero_point=False), "zero_point=False: must be true"),
    "blocks": (fp8((32, 32)), says(weight_block_size=[32]), "weight_block_size=.32.: must be two sizes"),
    "expression": (fp8((32, 32)), says(modules_to_not_convert=["("]), "the expression '\\(' .* is not supported"),
    "cache": (PACKED, says(kv_cache_scheme={"num_bits": 8}), "quantization_config.kv_cache_scheme is not supported"),
    "sparse": (
        PACKED,
        says(sparsity_config={"format": "sparse-24-bitmask"}),
        "sparsity_config .format=sparse-24-bitmask",
    ),
    "format": (PACKED, group_says("weights", num_bits=3), "num_bits=3, type=int, symmetric=False in pack-quantized"),
    "strategy": (PACKED, group_says("weights", strategy="token"), "weights.strategy='token': must be one of tensor"),
    "scales": (
        of_compressed_tensors("int-quantized", INT8),
        has(f"{DOWN}.weight_scale", torch.ones(63, 1)),
        f"tensor {DOWN}.weight_scale has shape .63, 1., not .64, 1.",
    ),
    "no scales": (
        of_compressed_tensors("float-quantized", FP8 | {"strategy": "channel"}),
        has(f"{DOWN}.weight_scale", None),
        f"tensor {DOWN}.weight_scale, of shape .64, 1., is missing",
    ),
    "weight shape": (PACKED, has(f"{DOWN}.weight_shape", torch.tensor([64, 191])), f"{DOWN}.weight_shape is .64, 191."),
    "codes": (
        gptq(4, 32),
        has(f"{DOWN}.qweight", words(23, 64)),
        f"tensor {DOWN}.qweight has shape .23, 64., not .24, 64.",
    ),
    "type": (
        gptq(4, 32),
        has(f"{DOWN}.qzeros", torch.ones(6, 8)),
        f"tensor {DOWN}.qzeros has type F32; must be one of I32",
    ),
    "group size": (awq(32), says(group_size=64), "qzeros has shape .2, 8., not .1, 8."),
    "no order": (
        gptq(4, 32, act_order=True),
        has(f"{DOWN}.g_idx", None),
        f"tensor {DOWN}.g_idx, of shape .192., is missing",
    ),
    "order": (gptq(4, 32), has(f"{DOWN}.g_idx", words(192) + 6), f"tensor {DOWN}.g_idx names groups 6 to 6 of 6"),
    "not symmetric": (gptq(4, 32, symmetric=False), says(sym=True), "qzeros differ from half the range"),
    "bias": (
        gptq(4, 32),
        has(f"{DOWN}.bias", torch.ones(64)),
        f"tensor {DOWN}.bias is not part of the model, and not zero",
    ),
    "another": (gptq(4, 32), has(f"{DOWN}.absmax", torch.ones(64)), f"{DOWN}.absmax: does not match"),
    "left out": (
        fp8((32, 32)),
        says(modules_to_not_convert=[DOWN]),
        f"tensor {DOWN}.weight_scale_inv: does not match",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_wrong_is_named(what: str, tmp_path: Path) -> None:
    kind, change, said = REFUSED[what]
    made(tmp_path, kind, change)
    with pytest.raises(ConfigError, match=said) as caught:
        checked(tmp_path)
    assert "\n" not in str(caught.value)


READ: dict[str, tuple[Kind, Change]] = {
    "no bias": (gptq(4, 32), has(f"{DOWN}.bias", torch.zeros(64))),
    "unset order": (PACKED, has(f"{DOWN}.weight_g_idx", words(192) - 1)),
    "zero points of none": (
        of_compressed_tensors("int-quantized", INT8),
        has(f"{DOWN}.weight_zero_point", words(64, 1)),
    ),
    "a name among targets": (
        PACKED,
        lambda config, tensors: config["quantization_config"]["config_groups"]["group_0"].update(
            targets=["re:.*_proj$", DOWN]
        ),
    ),
    "dynamic rules": (gptq(4, 32), says(dynamic={"-:.*embed.*": {}, "+:.*layers\\.1.*": {"bits": 4}}, bits=4)),
}


@pytest.mark.parametrize("what", READ)
def test_what_tools_write_beside_is_read_and_changes_no_weight(what: str, tmp_path: Path) -> None:
    kind, change = READ[what]
    found = []
    for name, own in (("plain", lambda config, tensors: None), ("changed", change)):
        torch.manual_seed(0)
        made(tmp_path / name, kind, own)
        checked(tmp_path / name)
        arch = Checkpoint.open(ModelConfig(weights=str(tmp_path / name))).arch
        source, (rows, columns) = (
            Checkpoint.open(ModelConfig(weights=str(tmp_path / name))).tensors(arch),
            tensor_shapes(arch)[f"{DOWN}.weight"],
        )
        assert source.format(f"{DOWN}.weight") is not None, "it stays quantized"
        found.append(source.read(f"{DOWN}.weight", slice(0, rows), slice(0, columns)))
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("file", "kind", "own"),
    [
        ("quantize_config.json", gptq(4, 32), {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}),
        ("quant_config.json", awq(32), {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}),
    ],
)
def test_a_file_of_an_older_tool_says_how(file: str, kind: Kind, own: dict[str, Any], tmp_path: Path) -> None:
    made(tmp_path, kind, without_config)
    (tmp_path / file).write_text(json.dumps(own))
    checked(tmp_path)
    (tmp_path / file).rename(tmp_path / "hf_quant_config.json")
    with pytest.raises(ConfigError, match="weights quantized by ModelOpt are not supported"):
        checked(tmp_path)


def test_groups_that_ranks_cut_become_smaller_or_are_told_of(tmp_path: Path) -> None:
    made(tmp_path, gptq(4, 64))
    arch = Checkpoint.open(ModelConfig(weights=str(tmp_path))).arch
    format_of = Checkpoint.open(ModelConfig(weights=str(tmp_path))).tensors(arch).format
    groups = [model_formats(format_of, arch, tp, "cpu").layers[0].fc2 for tp in (1, 2, 4, 8)]
    assert groups == [WeightFormat(4, 64), WeightFormat(4, 32), WeightFormat(4, 16), None]
    assert cut_too_small(format_of, arch, 4) is None
    assert cut_too_small(format_of, arch, 8) == (
        "parallel.tp=8 cuts the groups of tensor model.layers.0.self_attn.o_proj.weight to less than 16, so it is held "
        "in the model's type; with parallel.tp=4 it stays quantized"
    )
