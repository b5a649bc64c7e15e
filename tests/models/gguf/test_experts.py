"""Experts in GGUF stay quantized, and compute the tokens of `transformers` by what `gguf` makes of their blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from gapless.conf.schema import ModelConfig
from gapless.kernels.processor import multiplies_bfloat16
from gapless.kernels.weight_format import WeightFormat
from gapless.models.checkpoint import Checkpoint
from gapless.models.gguf.block_types import BLOCK_TYPES
from gapless.models.quantization.formats import model_formats
from tests.models.gguf.test_weights import IN_GGUF, model_of
from tests.models.test_tokens import check, job, prompts_of, reference
from tests.support.forked_ranks import run_ranks
from tests.support.gguf_files import converted, write_gguf
from tests.support.stage_driver import run_all
from tests.support.token_reference import quantized_tolerance

FORMATS = {name: each.format for name, each in BLOCK_TYPES.items()}
KINDS = {"mixtral": (Kind.Q4_1, Kind.Q8_0), "qwen2-moe": (Kind.Q5_1, Kind.Q4_0), "qwen3-moe": (Kind.Q8_0, Kind.F16)}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, np.ndarray, np.ndarray]]:
    """Write a file of each family, whose down projections are of another type than the rest."""
    torch.set_num_threads(1)
    made = {}
    for name, (kind, of_down) in KINDS.items():
        model = model_of(IN_GGUF[name])
        blocks, numbers = {}, {}
        for tensor, array in converted(model).items():
            if array.ndim > 1 and "gate_inp" not in tensor and "attn" not in tensor:
                of = of_down if "down" in tensor else kind
                blocks[tensor] = (gguf.quantize(array, of), of)
                numbers[tensor] = torch.from_numpy(gguf.dequantize(blocks[tensor][0], of)).float()
        file = write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", model, blocks=blocks)
        held = iter(numbers.values())
        plain = ("mlp.gate.weight", "shared_expert_gate.weight", *(f"self_attn.{part}_proj.weight" for part in "qkvo"))
        with torch.no_grad():
            for key, parameter in model.state_dict().items():
                if key.endswith("gate_up_proj"):
                    parameter.copy_(torch.cat([next(held), next(held)], dim=1))
                elif parameter.ndim > 1 and not key.endswith(plain):
                    parameter.copy_(next(held))
        made[name] = (file, *reference(model, prompts_of(101)))
    return made


@pytest.mark.parametrize(("pp", "tp", "whole"), [(1, 1, False), (1, 2, False), (2, 2, True)])
def test_tokens(pp: int, tp: int, whole: bool, files: dict[str, Any], tmp_path: Path) -> None:
    over = {"whole_experts": whole}
    jobs = [job(tmp_path / f"{name}.npz", weights=str(file), **over) for name, (file, *_) in files.items()]
    run_ranks(run_all, pp, tp, tmp_path, jobs)
    for name, (_, tokens, logits) in files.items():
        check(tmp_path / f"{name}.npz", tokens, logits, quantized_tolerance())


@pytest.mark.parametrize("kinds", [(Kind.MXFP4,) * 3, (Kind.Q4_1, Kind.Q8_0, Kind.MXFP4)])
def test_gate_and_up_of_gpt_oss_may_have_formats_of_their_own(kinds: tuple[Kind, ...], tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model, blocks = model_of(IN_GGUF["gpt-oss"]), {}
    arrays = converted(model)
    for part, kind in zip(("gate", "up", "down"), kinds, strict=True):
        names = [name for name in arrays if name.endswith(f"ffn_{part}_exps.weight")]
        blocks |= {name: (gguf.quantize(arrays[name], kind), kind) for name in names}
    numbers = {name: gguf.dequantize(*block) for name, block in blocks.items()}
    files = [write_gguf(tmp_path / "blocks.gguf", model, blocks=blocks)]
    files.append(write_gguf(tmp_path / "numbers.gguf", model, more=numbers))
    run_ranks(run_all, 1, 2, tmp_path, [job(tmp_path / f"{file.stem}.npz", weights=str(file)) for file in files])
    expected = np.load(tmp_path / "numbers.npz")
    check(tmp_path / "blocks.npz", expected["tokens"], expected["logits"], quantized_tolerance())
    arch = Checkpoint.open(ModelConfig(weights=str(files[0]))).arch
    format_of = Checkpoint.open(ModelConfig(weights=str(files[0]))).tensors(arch).format
    on_cpu, on_cuda = (model_formats(format_of, arch, 1, device).layers[0].experts for device in ("cpu", "cuda"))
    down = WeightFormat(8, 32) if multiplies_bfloat16() else FORMATS["MXFP4"]
    assert on_cpu == (WeightFormat(8, 32, has_offsets=True) if Kind.Q4_1 in kinds else down, down)
    assert on_cuda is not None
    assert on_cuda[1] == FORMATS["MXFP4"]


def test_experts_stay_in_their_blocks_formats(files: dict[str, Any]) -> None:
    for name, (kind, of_down) in KINDS.items():
        file = files[name][0]
        arch = Checkpoint.open(ModelConfig(weights=str(file))).arch
        own = model_formats(
            Checkpoint.open(ModelConfig(weights=str(file))).tensors(arch).format, arch, 2, "cpu"
        ).layers[1]
        expected = (FORMATS[kind.name], FORMATS[of_down.name]) if of_down.name in FORMATS else None
        assert own.experts == expected
