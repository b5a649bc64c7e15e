"""Quantized folders of experts compute the tokens of `transformers` by the weights that the formats' libraries make."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from gapless.conf.errors import ConfigError
from gapless.conf.schema import ModelConfig
from gapless.kernels.processor import multiplies_bfloat16
from gapless.kernels.weight_format import WeightFormat
from gapless.models.checkpoint import Checkpoint
from gapless.models.layout import tensor_shapes
from gapless.models.quantization.formats import LayerFormats, cut_too_small, model_formats, rounded_format
from gapless.models.quantization.matrices import round_to
from gapless.parallel.groups import Groups
from gapless.parallel.mesh import Mesh
from gapless.parallel.rendezvous import Rendezvous
from tests.models.test_quantized_folders import FP8, INT4, INT8
from tests.support.expert_models import COMMON, EXPERTS, LATENT
from tests.support.forked_ranks import run_ranks
from tests.support.quantized_folders import Kind, awq, fp8, gptq, of_compressed_tensors, write_experts, write_mxfp4
from tests.support.stage_driver import run, run_all
from tests.support.tiers import first_quick
from tests.support.token_reference import check, job, prompts_of, quantized_tolerance, reference

WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.25}
OF_EXPERTS = EXPERTS | {"moe_intermediate_size": 64}
RANKS = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "v_head_dim": 16}
FAMILIES = {
    "mixtral": transformers.MixtralConfig(**COMMON | WIDE | {"intermediate_size": 64}, num_local_experts=6),
    "qwen2-moe": transformers.Qwen2MoeConfig(
        **COMMON | WIDE | OF_EXPERTS, num_experts=8, shared_expert_intermediate_size=128, mlp_only_layers=[1]
    ),
    "qwen3-moe": transformers.Qwen3MoeConfig(
        **COMMON | WIDE | OF_EXPERTS, num_experts=8, head_dim=16, norm_topk_prob=True
    ),
    "deepseek-v3": transformers.DeepseekV3Config(
        **LATENT | WIDE | OF_EXPERTS | RANKS, n_group=4, topk_group=2, routed_scaling_factor=2.5
    ),
}
FAMILIES["gpt-oss"] = transformers.GptOssConfig(
    **COMMON | WIDE | {"intermediate_size": 64},
    num_experts_per_tok=3,
    num_local_experts=8,
    head_dim=16,
    sliding_window=9,
    swiglu_limit=1.5,
)
W4A16 = of_compressed_tensors("pack-quantized", INT4 | {"symmetric": False})
MIXED = Kind(  # no shared expert, no attention, no experts of the first layer
    W4A16.config | {"ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_expert.*", "re:.*layers[.]0[.]"]},
    W4A16.pack,
    (
        *("lm_head", *(f"self_attn.{each}_proj" for each in "qkvo")),
        *(f"shared_expert.{part}_proj" for part in ("gate", "up", "down")),
        *(f"layers.0.mlp.experts.{e}.{part}_proj" for e in range(8) for part in ("gate", "up", "down")),
    ),
)
KINDS: dict[str, tuple[str, Kind | None]] = {
    "ct-w4a16": ("mixtral", W4A16),
    "ct-int8": ("qwen3-moe", of_compressed_tensors("int-quantized", INT8)),
    "ct-fp8": ("qwen3-moe", of_compressed_tensors("float-quantized", FP8 | {"strategy": "channel"})),
    "ct-mixed": ("qwen2-moe", MIXED),
    "gptq": ("qwen2-moe", gptq(4, 32)),
    "gptq-act-order": ("qwen3-moe", gptq(4, 32, symmetric=False, act_order=True)),
    "awq": ("qwen3-moe", awq(32)),
    "awq-deepseek": ("deepseek-v3", awq(32)),
    "mxfp4": ("gpt-oss", None),
    "fp8-deepseek": ("deepseek-v3", fp8((32, 32))),
}


def rounded(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Return the numbers that `model.quantization=int4` makes of a tensor; what routes tokens stays as it is."""
    if name.endswith("experts.gate_up_proj") or name.endswith("experts.down_proj"):  # [E, in, out]
        return torch.stack([rounded("proj.weight", own.T).T for own in weight])
    is_table = name.endswith(("embed_tokens.weight", "lm_head.weight"))
    if not is_table and not name.endswith("proj.weight"):
        return weight
    format = rounded_format("int4", weight.shape[1], is_table=is_table)
    assert format is not None
    return round_to(weight, format).dequantized()


@pytest.fixture(scope="module")
def plain_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, np.ndarray, np.ndarray]]:
    """Make folders that are not quantized, with the tokens and logits of their rounded numbers."""
    torch.set_num_threads(1)
    made = {}
    for name in ("qwen2-moe", "gpt-oss"):
        torch.manual_seed(13)
        model = transformers.AutoModelForCausalLM.from_config(FAMILIES[name])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        numbers = load_file(folder / "model.safetensors")
        held = folder / "numbers"
        held.mkdir()
        save_file({key: rounded(key, each).contiguous() for key, each in numbers.items()}, held / "model.safetensors")
        shutil.copy(folder / "config.json", held)
        made[name] = (
            folder,
            *reference(transformers.AutoModelForCausalLM.from_pretrained(held, dtype=torch.float32), prompts_of(101)),
        )
    return made


@pytest.mark.parametrize(("pp", "tp", "whole"), [(1, 1, False), (1, 2, False), (2, 2, True)])
def test_a_checkpoint_is_rounded_as_it_is_loaded(
    pp: int, tp: int, whole: bool, plain_folders: dict[str, Any], tmp_path: Path
) -> None:
    over = {"whole_experts": whole, "quantization": "int4"}
    jobs = [job(tmp_path / f"{name}.npz", weights=str(folder), **over) for name, (folder, *_) in plain_folders.items()]
    run_ranks(run_all, pp, tp, tmp_path, jobs)
    for name, (_, tokens, logits) in plain_folders.items():
        check(tmp_path / f"{name}.npz", tokens, logits, quantized_tolerance())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, np.ndarray, np.ndarray]]:
    torch.set_num_threads(1)
    made = {}
    for name, (family, kind) in KINDS.items():
        torch.manual_seed(11)
        model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family])
        folder = tmp_path_factory.mktemp(name)
        with torch.no_grad():
            held = write_mxfp4(folder, model) if kind is None else write_experts(folder, model, kind)
        made[name] = (folder, *reference(held, prompts_of(101)))
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank(kind: str, folders: dict[str, Any], tmp_path: Path) -> None:
    folder, tokens, logits = folders[kind]
    arch = Checkpoint.open(ModelConfig(weights=str(folder))).arch
    Checkpoint.open(ModelConfig(weights=str(folder))).tensors(arch).check(arch, tensor_shapes(arch))
    with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 60) as groups:
        run(groups, job(tmp_path / "out.npz", weights=str(folder)))
    check(tmp_path / "out.npz", tokens, logits, quantized_tolerance())


@pytest.mark.parametrize(
    ("pp", "tp", "whole"),
    first_quick([(1, 2, True), (1, 2, False), (2, 1, False), (2, 2, True)]),
)
def test_meshes(pp: int, tp: int, whole: bool, folders: dict[str, Any], tmp_path: Path) -> None:
    jobs = [
        job(tmp_path / f"{name}.npz", weights=str(folder), whole_experts=whole)
        for name, (folder, *_) in folders.items()
    ]
    run_ranks(run_all, pp, tp, tmp_path, jobs)
    for name, (_, tokens, logits) in folders.items():
        check(tmp_path / f"{name}.npz", tokens, logits, quantized_tolerance())


def formats_of(folder: Path, tp: int, whole: bool = False) -> tuple[LayerFormats, ...]:
    arch = Checkpoint.open(ModelConfig(weights=str(folder))).arch
    return model_formats(
        Checkpoint.open(ModelConfig(weights=str(folder))).tensors(arch).format, arch, tp, "cpu", whole_experts=whole
    ).layers


def test_experts_stay_quantized_where_there_is_a_product(folders: dict[str, Any]) -> None:
    four, rows = WeightFormat(4, 32, has_offsets=True), WeightFormat(8, 64)
    assert formats_of(folders["awq"][0], 2)[0] == LayerFormats(four, four, four, four)
    assert formats_of(folders["ct-int8"][0], 2)[0] == LayerFormats(rows, WeightFormat(8, 32), rows, WeightFormat(8, 32))
    assert formats_of(folders["ct-int8"][0], 2, whole=True)[0].experts == (rows, rows)
    assert formats_of(folders["fp8-deepseek"][0], 1)[1].experts is None
    of_mxfp4 = WeightFormat(8, 32) if multiplies_bfloat16() else WeightFormat(4, 32, is_float=True)
    assert formats_of(folders["mxfp4"][0], 1)[1].experts == (of_mxfp4, of_mxfp4)
    mixed = formats_of(folders["ct-mixed"][0], 1)
    assert [each.experts for each in mixed] == [None, (four, four), (four, four)]
    assert {each.qkv for each in mixed} == {None}
    assert formats_of(folders["gptq"][0], 1)[2].shared == LayerFormats(fc1=WeightFormat(4, 32), fc2=WeightFormat(4, 32))


def test_whole_experts_keep_the_groups_that_slices_would_cut(folders: dict[str, Any]) -> None:
    folder = folders["awq"][0]
    assert [formats_of(folder, 8, whole=whole)[0].experts is None for whole in (False, True)] == [True, False]
    arch = Checkpoint.open(ModelConfig(weights=str(folder))).arch
    format_of = Checkpoint.open(ModelConfig(weights=str(folder))).tensors(arch).format
    told = cut_too_small(lambda name: format_of(name) if ".experts." in name else None, arch, 8)
    assert told is not None
    assert told.startswith("parallel.tp=8 cuts the groups of tensor model.layers.0.mlp.experts.0.down_proj.weight to")


DOWN = "model.layers.1.mlp.experts.3.down_proj"
ROUTER = "model.layers.0.mlp.gate"
REFUSED: dict[str, tuple[str, dict[str, torch.Tensor | None], str]] = {
    "no scales": (
        "ct-int8",
        {f"{DOWN}.weight_scale": None},
        f"tensor {DOWN}.weight_scale, of shape .64, 1., is missing",
    ),
    "scales": (
        "ct-int8",
        {f"{DOWN}.weight_scale": torch.ones(63, 1)},
        f"tensor {DOWN}.weight_scale has shape .63, 1., not .64, 1.",
    ),
    "codes": (
        "awq",
        {f"{DOWN}.qweight": torch.zeros(32, 8, dtype=torch.int32)},
        f"tensor {DOWN}.qweight has shape .32, 8., not .64, 8.",
    ),
    "not quantized": ("awq", {f"{DOWN}.qweight": None, f"{DOWN}.weight": torch.zeros(64, 64)}, f"tensor {DOWN}"),
    "another scheme": (
        "awq",
        {f"{DOWN}.absmax": torch.ones(64)},
        f"tensor {DOWN}.absmax: does not match quantization_config",
    ),
    "router without codes": (
        "gptq",
        {f"{ROUTER}.weight": None, f"{ROUTER}.g_idx": torch.zeros(64, dtype=torch.int32)},
        f"tensor {ROUTER}.qweight, of shape .8, 8., is missing",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_wrong_with_an_expert_is_named(what: str, folders: dict[str, Any], tmp_path: Path) -> None:
    kind, changes, said = REFUSED[what]
    folder = folders[kind][0]
    shutil.copy(folder / "config.json", tmp_path)
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: each for name, each in tensors.items() if each is not None}, tmp_path / "model.safetensors")
    arch = Checkpoint.open(ModelConfig(weights=str(tmp_path))).arch
    with pytest.raises(ConfigError, match=said) as caught:
        Checkpoint.open(ModelConfig(weights=str(tmp_path))).tensors(arch).check(arch, tensor_shapes(arch))
    assert "\n" not in str(caught.value)


def test_a_scheme_for_all_experts_in_one_tensor_is_refused(folders: dict[str, Any], tmp_path: Path) -> None:
    """Of those that are stored so, gpt-oss's MXFP4 alone is read."""
    folder = folders["mxfp4"][0]
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": W4A16.config}))
    shutil.copy(folder / "model.safetensors", tmp_path)
    arch = Checkpoint.open(ModelConfig(weights=str(tmp_path))).arch
    with pytest.raises(ConfigError, match=r"_(blocks|scales): does not match quantization_config"):
        Checkpoint.open(ModelConfig(weights=str(tmp_path))).tensors(arch).check(arch, tensor_shapes(arch))
