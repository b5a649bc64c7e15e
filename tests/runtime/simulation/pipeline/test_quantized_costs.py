"""What quantized weights change in predicted times, memory and plans."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.conf.build import build, group_names, load_group, load_hardware
from gapless.conf.errors import ConfigError
from gapless.conf.schema import Architecture, SimulateConfig
from gapless.kernels.weight_format import WeightFormat
from gapless.models.memory import MemoryModel
from gapless.runtime.engine.plan import make_plan
from gapless.runtime.simulation.cost.analytic import AnalyticOperators
from gapless.runtime.simulation.cost.gemm import Gemm
from gapless.runtime.simulation.cost.operators import LAYER_LINEARS, Linear
from gapless.runtime.simulation.cost.stage_costs import MicroBatchShape
from gapless.runtime.simulation.pipeline.make_costs import make_costs, make_operators
from tests.support.tiers import examples

DEVICES = [name for name in group_names("hardware") if load_hardware(name).costs is not None]
BYTES = WeightFormat(8, 1 << 20)  # and hardly any scales
NIBBLES = WeightFormat(4, 1 << 20)
INT8 = WeightFormat(8, 1 << 20, int8_activations=True)
FP8 = WeightFormat(8, 1 << 20, is_float=True)
KINDS = ("int8", "int4", "fp8")
law = settings(max_examples=examples(50))


def config(quantization: str | None, device: str = "h100", model: str = "llama2-70b", **more: Any) -> SimulateConfig:
    return build(
        SimulateConfig,
        {
            "model": load_group("model", model) | {"quantization": quantization},
            "hardware": load_group("hardware", device),
            "parallel": {"tp": 4, "launcher": "ray"},
            **more,
        },
    )


def operators(device: str, weights: WeightFormat | None = None, head: WeightFormat | None = None) -> AnalyticOperators:
    hardware = load_hardware(device)
    assert hardware.costs is not None
    arch = Architecture(**load_group("model", "llama2-70b")["architecture"])
    return AnalyticOperators(arch, 1, hardware.costs, 2, attention=hardware.attention, layers=weights, head=head)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAYER_LINEARS)
def test_half_the_bytes_of_one_row_take_half_the_time(device: str, name: Linear) -> None:
    """But for what a kernel takes to launch and to compute its tiles, most of whose rows are empty."""
    whole, half, quarter = (operators(device, format).linear(name, 1) for format in (None, BYTES, NIBBLES))
    assert 0.5 < half / whole < 0.75
    assert 0 < half - quarter < (whole - half) / 2


@law
@given(
    st.sampled_from(DEVICES),
    st.sampled_from(LAYER_LINEARS),
    st.integers(1, 9000),
    st.sampled_from((BYTES, NIBBLES, INT8, FP8)),
)
def test_fewer_bytes_and_faster_products_never_take_longer(
    device: str, name: Linear, rows: int, format: WeightFormat
) -> None:
    plain, quantized = operators(device), operators(device, format)
    assert quantized.linear(name, rows) <= plain.linear(name, rows) * (1 + 1e-12)
    assert quantized.linear(name, rows) <= quantized.linear(name, rows + 1)
    assert quantized.linear("head", rows) == plain.linear("head", rows)
    assert quantized.others(rows) == plain.others(rows)


def test_products_of_many_rows_are_as_fast_as_the_device_multiplies() -> None:
    """Power bounds products of 8 bits on an H100, as its servers show; an A100's are not measured."""
    for device, gains in (("h100", (1, 1, 1.2, 1.2)), ("a100-80g", (1, 1, 2, 1))):
        times = [operators(device, each).linear("ffn_ln1", 8192) for each in (None, BYTES, INT8, FP8)]
        assert [times[0] / each for each in times] == pytest.approx(gains, rel=0.1), device


def test_rounding_an_input_takes_a_kernel_and_blocks_of_weights_have_a_rate() -> None:
    costs = load_hardware("h100").costs
    assert costs is not None
    fused = dataclasses.replace(costs.gemm, cast_gigabytes_per_s=None)
    sizes = [np.array(float(size)) for size in (4096, 8192, 8192)]
    times = {
        (name, group): float(Gemm(config, 132, 2, WeightFormat(8, group, is_float=True)).seconds(*sizes))
        for name, config in (("cast", costs.gemm), ("fused", fused))
        for group in (128, 8192)
    }
    assert costs.gemm.cast_gigabytes_per_s is not None
    cast = costs.gemm.cast_us * 1e-6 + 3 * 4096 * 8192 / (costs.gemm.cast_gigabytes_per_s * 1e9)
    for group in (128, 8192):
        assert times["cast", group] - times["fused", group] == pytest.approx(cast)
    assert times["fused", 128] != times["fused", 8192]


def test_a_head_of_its_own_format() -> None:
    plain, quantized = operators("h100"), operators("h100", head=BYTES)
    assert quantized.linear("head", 1) < 0.7 * plain.linear("head", 1)
    assert quantized.linear("ffn_ln1", 1) == plain.linear("ffn_ln1", 1)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_keys_of_8_bits_take_half_the_memory_and_time(dtype: str) -> None:
    """But for their scales, 4 bytes beside 128."""
    plain, short = config(None), config(None, cache={"dtype": dtype, "block_size": 16})
    plan = make_plan(plain)
    slots = [
        MemoryModel(plan.arch, plain.parallel, [plain.hardware], 2, cache_dtype=each).slots()
        for each in ("auto", dtype)
    ]
    assert slots[1] / slots[0] == pytest.approx(2 / (1 + 4 / 128), rel=0.02)
    before, after = (make_operators(each, each.hardware, plan) for each in (plain, short))
    times = [each.decode_attention(256, 256 * 4096) for each in (before, after)]
    assert times[0] / times[1] == pytest.approx(2 / (1 + 4 / 128), rel=0.05)
    assert after.chunk_attention(512, 512) == before.chunk_attention(512, 512)
    assert after.others(65536) < before.others(65536)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_quantized_and_their_router_is_not(kind: str) -> None:
    times = []
    for each in (config(None, model="mixtral-8x7b"), config(kind, model="mixtral-8x7b")):
        plan = make_plan(each)
        times.append(make_operators(each, each.hardware, plan, False, *plan.kind(0)))
    before, after = times
    assert after.linear("ffn_ln1", 1) < 0.7 * before.linear("ffn_ln1", 1)
    assert after.routing(64) == before.routing(64)


def test_half_the_weights_leave_room_for_more_sequences() -> None:
    """Weights of 70B take 32 of 67 GiB on each of four ranks: half of them leaves 1.45 times the room."""
    slots = []
    for each in (config(None), config("fp8")):
        plan = make_plan(each)
        memory = MemoryModel(plan.arch, each.parallel, [each.hardware], 2, formats=plan.formats)
        slots.append(memory.slots())
    assert slots[1] / slots[0] == pytest.approx(1.45, rel=0.03)


def test_decodes_of_70b_are_faster_in_fp8() -> None:
    two = {"tp": 2, "launcher": "ray"}
    whole, half = (make_plan(config(each, parallel=two)) for each in (None, "fp8"))
    shape = MicroBatchShape(decodes=8, context=8000, sampled=8)
    slow, fast = (
        make_costs(config(each, parallel=two), plan).seconds(shape)[0] for each, plan in ((None, whole), ("fp8", half))
    )
    assert 1.4 < slow / fast < 2


def test_a_folder_is_simulated_as_its_config_says(tmp_path: Path) -> None:
    own = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
    }
    (tmp_path / "config.json").write_text(json.dumps(own))
    each = build(SimulateConfig, {"model": {"weights": str(tmp_path)}, "hardware": load_group("hardware", "h100")})
    formats = make_plan(each).formats
    assert formats.typical is not None
    assert (formats.typical.bits, formats.head) == (4, None)


def test_rates_are_positive() -> None:
    hardware = load_group("hardware", "h100")
    hardware["costs"]["gemm"]["fp8_rate"] = 0.0
    with pytest.raises(ConfigError, match=r"hardware\.costs\.gemm\.fp8_rate=0.0: must be null or above 0"):
        config(None, hardware=hardware)
