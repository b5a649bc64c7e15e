"""Experts in MXFP4 are read as the numbers that `transformers` makes of them, slice by slice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from gapless.conf.errors import ConfigError
from gapless.conf.schema import ModelConfig
from gapless.kernels.weight_format import WeightFormat
from gapless.models.checkpoint import Checkpoint
from gapless.models.layout import tensor_shapes
from gapless.models.quantization.matrices import converted

EXPERTS, HIDDEN, WIDTH = 3, 64, 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a gpt-oss whose experts are blocks of 4 bits and their scales."""
    path = tmp_path_factory.mktemp("mxfp4")
    config = transformers.GptOssConfig(
        vocab_size=50,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        eos_token_id=None,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    torch.manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        _, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(256, (EXPERTS, outputs, inputs // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(110, 140, (EXPERTS, outputs, inputs // 32), dtype=torch.uint8)
    save_file(tensors, path / "model.safetensors")
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | {"quantization_config": {"quant_method": "mxfp4"}}))
    return path


def test_slices_are_those_of_transformers(folder: Path) -> None:
    arch = Checkpoint.open(ModelConfig(weights=str(folder))).arch
    checkpoint, tensors = (
        Checkpoint.open(ModelConfig(weights=str(folder))).tensors(arch),
        load_file(folder / "model.safetensors"),
    )
    checkpoint.check(arch, tensor_shapes(arch))
    for kind, shape in (("gate_up_proj", (HIDDEN, 2 * WIDTH)), ("down_proj", (WIDTH, HIDDEN))):
        name = f"model.layers.1.mlp.experts.{kind}"
        whole = convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
        for e in range(EXPERTS):
            assert checkpoint.shape(f"{name}[{e}]") == shape
            for rows, columns in ((slice(0, shape[0]), slice(0, shape[1])), (slice(5, 31), slice(7, 20))):
                assert torch.equal(checkpoint.read(f"{name}[{e}]", rows, columns), whole[e, rows, columns].float())
            assert checkpoint.format(f"{name}[{e}]") == WeightFormat(4, 32, is_float=True)
            for inputs in (slice(0, shape[0]), slice(16, 32)):  # a group, and half of one
                found = checkpoint.read_quantized(f"{name}[{e}]", slice(3, 20), inputs)
                as_integers = converted(found, WeightFormat(8, found.format.group))
                for matrix in (found, as_integers):
                    assert torch.equal(matrix.dequantized(), whole[e, inputs, 3:20].T.float())
    checkpoint.close()


def test_other_quantized_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": {"quant_method": "nonsense"}}))
    with pytest.raises(ConfigError, match=r"quant_method=.nonsense. is not supported"):
        _ = Checkpoint.open(ModelConfig(weights=str(tmp_path)), tensors=False).arch


def test_blocks_that_are_not_said_to_be_or_do_not_fit_are_refused(folder: Path, tmp_path: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in values.items() if k != "quantization_config"}))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"proj_(blocks|scales): is quantized, but config.json has no"):
        checked(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(values))
    name = "model.layers.1.mlp.experts.down_proj_scales"
    save_file(tensors | {name: tensors[name][:, 1:].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"tensor .*down_proj_scales\[\d\] has shape .63, 1., not .64, 1."):
        checked(tmp_path)


def checked(folder: Path) -> None:
    arch = Checkpoint.open(ModelConfig(weights=str(folder))).arch
    Checkpoint.open(ModelConfig(weights=str(folder))).tensors(arch).check(arch, tensor_shapes(arch))
