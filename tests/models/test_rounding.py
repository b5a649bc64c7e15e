"""`model.quantization` rounds to the nearest number of each group's range, on any mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from gapless.conf.architecture import Architecture
from gapless.conf.build import build, load_group
from gapless.conf.errors import ConfigError
from gapless.conf.schema import EngineConfig, ModelConfig, SimulateConfig
from gapless.kernels.weight_format import WeightFormat
from gapless.models.checkpoint import Checkpoint
from gapless.models.quantization.formats import model_formats
from gapless.models.quantization.matrices import converted, cut_groups, round_to
from gapless.runtime.engine.plan import make_plan
from tests.models.test_quantized_folders import CONFIG
from tests.models.test_tokens import job, prompts_of
from tests.support.forked_ranks import run_ranks
from tests.support.quantized_folders import gptq, write
from tests.support.stage_driver import run_all

FORMATS = st.builds(WeightFormat, st.sampled_from([4, 8]), st.sampled_from([16, 32, 96]), st.booleans())


@given(format=FORMATS, seed=st.integers(0, 99))
def test_no_number_is_further_off_than_half_a_step(format: WeightFormat, seed: int) -> None:
    numbers = torch.randn(5, 96, generator=torch.Generator().manual_seed(seed))
    numbers[0] = 0.0
    matrix = round_to(numbers, format)
    steps = matrix.scales.repeat_interleave(format.group, dim=1)
    assert ((matrix.dequantized() - numbers).abs() <= 0.501 * steps + 1e-6).all()


def test_fp8_keeps_three_bits() -> None:
    numbers = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    found = round_to(numbers, WeightFormat(8, 64, is_float=True)).dequantized()
    torch.testing.assert_close(found, numbers, rtol=2**-4, atol=1e-2)


@pytest.mark.parametrize(("bits", "to_bits"), [(4, 4), (4, 8), (8, 8)])
@pytest.mark.parametrize(("offsets", "to_offsets"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize(("group", "to_group"), [(16, 16), (16, 8), (96, 48), (32, 32), (96, 16)])
def test_a_conversion_is_exact(
    bits: int, to_bits: int, offsets: bool, to_offsets: bool, group: int, to_group: int
) -> None:
    own, target = WeightFormat(bits, group, offsets), WeightFormat(to_bits, to_group, to_offsets)
    matrix = round_to(torch.randn(5, 96, generator=torch.Generator().manual_seed(1)), own)
    found = converted(matrix, target)
    assert found.format == target
    torch.testing.assert_close(found.dequantized(), matrix.dequantized(), rtol=0, atol=1e-6)


@given(group=st.sampled_from([4, 6, 8, 24]), bounds=st.tuples(st.integers(0, 24), st.integers(0, 24)))
def test_scales_of_a_slice_are_those_of_its_columns(group: int, bounds: tuple[int, int]) -> None:
    first, last = sorted(bounds)
    last = max(last, first + 1)
    if last > 24:
        first, last = 23, 24
    values = torch.rand(3, 24 // group, generator=torch.Generator().manual_seed(0))
    found, smaller = cut_groups(values[:, first // group : -(-last // group)], group, slice(first, last))
    assert torch.equal(found.repeat_interleave(smaller, 1), values.repeat_interleave(group, 1)[:, first:last])


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.12), ("int4", 0.5)])
def test_logits_are_near_on_every_mesh(kind: str, most: float, tmp_path: Path) -> None:
    torch.manual_seed(11)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).save_pretrained(tmp_path / "model")
    found = {}
    for pp, tp in ((1, 1), (1, 2), (2, 1)):
        jobs: list[dict[str, Any]] = [
            job(tmp_path / f"{name}.npz", weights=str(tmp_path / "model"), quantization=given_kind, num_new=1)
            for name, given_kind in (("plain", None), ("rounded", kind))
        ]
        ranks = tmp_path / f"{pp}{tp}"
        ranks.mkdir()
        run_ranks(run_all, pp, tp, ranks, jobs)
        plain, rounded = (np.load(tmp_path / f"{name}.npz")["logits"] for name in ("plain", "rounded"))
        error = np.abs(plain - rounded).max() / np.abs(plain).max()
        assert 1e-4 < error < most
        found[pp, tp] = rounded
    np.testing.assert_allclose(found[2, 1], found[1, 1], atol=1e-4 * np.abs(found[1, 1]).max())
    assert len(prompts_of(101)) == len(found[1, 1])


def test_ranks_round_the_groups_that_they_hold() -> None:
    """Half of a row of 96 columns has 48, in groups of 16."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16}
    arch = Architecture(**sizes, ffn_size=96, max_position=64)
    source, name = (
        Checkpoint.open(ModelConfig(architecture=arch, quantization="int4")).tensors(arch),
        "model.layers.0.mlp.down_proj.weight",
    )
    rows, columns = slice(0, 8), slice(48, 96)
    found = source.read_quantized(name, rows, columns)
    assert found.format == model_formats(source.format, arch, 2, "cpu").layers[0].fc2
    expected = round_to(source.read(name, rows, columns), found.format)
    assert torch.equal(found.dequantized(), expected.dequantized())


def test_quantized_weights_are_not_rounded_again(tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG | {"num_hidden_layers": 1}))
    with torch.no_grad():
        write(tmp_path, model, gptq(4, 32))
    config = EngineConfig(model=ModelConfig(weights=str(tmp_path), tokenizer="none", quantization="int8"))
    said = f"model.quantization=int8: {tmp_path} has quantized weights, which stay as they are; must be null"
    with pytest.raises(ConfigError, match=said):
        make_plan(config)


def test_fp8_is_for_cuda_and_simulations() -> None:
    with pytest.raises(ConfigError, match="must be null, int8 or int4 on a CPU"):
        make_plan(EngineConfig(model=ModelConfig(weights="shipped", quantization="fp8")))
    blocks = {}
    for kind in (None, "fp8", "int8", "int4"):
        model = load_group("model", "llama2-70b") | {"quantization": kind}
        hardware, grid = load_group("hardware", "h100"), {"tp": 4, "launcher": "ray"}
        blocks[kind] = make_plan(
            build(SimulateConfig, {"model": model, "hardware": hardware, "parallel": grid})
        ).num_blocks
    assert blocks[None] < blocks["fp8"] <= blocks["int8"] < blocks["int4"]
