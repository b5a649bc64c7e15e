"""Which layers a `quantization_config` means, as the libraries that write it understand it, and common formats."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.utils.match import match_targets
from transformers.quantizers.quantizers_utils import should_convert_module

from gapless.kernels.weight_format import WeightFormat
from gapless.models.model_config import ModelValues
from gapless.models.quantization.config import read_quantization
from gapless.models.quantization.formats import common_format
from gapless.models.quantization.schemes import Bytes, Packed, SchemeOf

NAMES = [
    f"model.layers.{layer}.{part}"
    for layer in (1, 10, 11)
    for part in ("mlp.gate", "mlp.gate_proj", "mlp.down_proj", "self_attn.q_proj")
]


def schemes(**config: Any) -> SchemeOf:
    values = ModelValues(Path("config.json"), {"model_type": "llama", "quantization_config": config})
    found = read_quantization(values)
    assert found is not None
    return found


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
@pytest.mark.parametrize(
    "pattern",
    [
        *("model.layers.1", "model.layers.1.", "model.layers.1.mlp.down_proj", "down_proj", "proj", "mlp.gate"),
        *(r"model\.layers\.\d+\.mlp", "model.layers.1|model.layers.11", "model.layers.*gate", "layers.1"),
    ],
)
def test_layers_that_fp8_keeps_are_those_that_transformers_keeps(key: str, pattern: str) -> None:
    scheme_of = schemes(quant_method="fp8", **{key: [pattern]})
    assert {name: scheme_of(name) is None for name in NAMES} == {
        name: not should_convert_module(name, [pattern]) for name in NAMES
    }


def packed(number: int, targets: list[str]) -> dict[str, Any]:
    """Return a group of 4-bit weights that its size tells from others."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32 << number}
    return {"targets": targets, "format": "pack-quantized", "weights": weights}


TARGETS = ("Linear", "re:.*down_proj", "re:.*layers.1[.].*", "model.layers.1.mlp.down_proj")


@pytest.mark.parametrize("order", list(permutations(range(4))), ids=str)
def test_the_group_of_a_layer_is_that_of_its_most_exact_target(order: tuple[int, ...]) -> None:
    """In whatever order a file has its groups; compressed-tensors itself says which target comes first."""
    groups = {f"group_{place}": packed(number, [TARGETS[number]]) for place, number in enumerate(order)}
    scheme_of = schemes(quant_method="compressed-tensors", config_groups=groups, ignore=["re:.*q_proj"])
    for name in NAMES:
        scheme = scheme_of(name)
        if name.endswith("q_proj"):
            assert scheme is None
            continue
        assert isinstance(scheme, Packed)
        first = match_targets(name, torch.nn.Linear(1, 1), TARGETS)[0]
        assert scheme.group == 32 << TARGETS.index(first), name


@pytest.mark.parametrize(
    ("inputs", "strategy", "symmetric", "rounds"),
    [
        (None, "channel", True, False),
        ({"num_bits": 8, "type": "int"}, "channel", True, True),
        ({"num_bits": 8, "type": "int"}, "tensor", True, True),
        ({"num_bits": 8, "type": "int"}, "channel", False, False),
        ({"num_bits": 8, "type": "int"}, "group", True, False),
        ({"num_bits": 8, "type": "float"}, "channel", True, False),
        ({"num_bits": 4, "type": "int"}, "channel", True, False),
    ],
)
def test_activations_are_rounded_only_if_the_file_rounds_them(
    inputs: dict[str, Any] | None, strategy: str, symmetric: bool, rounds: bool
) -> None:
    weights = {"num_bits": 8, "type": "int", "strategy": strategy, "symmetric": symmetric}
    weights |= {"group_size": 32} if strategy == "group" else {}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    scheme = schemes(quant_method="compressed-tensors", format="int-quantized", config_groups={"a": group})(NAMES[0])
    assert isinstance(scheme, Bytes)
    assert scheme.int8_activations == rounds


INT8, ROUNDED = WeightFormat(8, 64), WeightFormat(8, 64, int8_activations=True)
INT4, OFFSETS = WeightFormat(4, 32), WeightFormat(4, 64, has_offsets=True)


@pytest.mark.parametrize(
    ("formats", "in_size", "common"),
    [
        ([ROUNDED, ROUNDED], 64, ROUNDED),
        ([ROUNDED, INT8], 64, INT8),
        ([ROUNDED, ROUNDED], 32, WeightFormat(8, 32, int8_activations=True)),
        ([ROUNDED, INT4], 64, WeightFormat(8, 32)),
        ([ROUNDED] * 2, 128, WeightFormat(8, 64)),
        ([INT4, OFFSETS], 64, WeightFormat(4, 32, has_offsets=True)),
        ([INT8, OFFSETS], 64, WeightFormat(8, 64, has_offsets=True)),
        ([INT4, INT4], 48, WeightFormat(4, 16)),
        ([INT4, INT4], 40, None),
        ([INT4, None], 64, None),
        ([INT8, WeightFormat(8, 64, is_float=True)], 64, None),
        ([INT8, WeightFormat(4, 32, is_float=True)], 64, WeightFormat(8, 32)),
        ([WeightFormat(4, 16, half_scales=True), INT4], 64, WeightFormat(4, 16)),
    ],
)
def test_a_common_format_holds_each_of_its_parts(
    formats: list[WeightFormat | None], in_size: int, common: WeightFormat | None
) -> None:
    assert common_format(formats, in_size) == common_format(formats[::-1], in_size) == common
