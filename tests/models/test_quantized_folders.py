"""Quantized folders compute the tokens of `transformers` by the weights that the formats' libraries make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from gapless.conf.schema import ModelConfig
from gapless.models.checkpoint import Checkpoint
from gapless.models.layout import tensor_shapes
from gapless.parallel.groups import Groups
from gapless.parallel.mesh import Mesh
from gapless.parallel.rendezvous import Rendezvous
from tests.models.test_tokens import check, job, prompts_of, reference
from tests.support.forked_ranks import run_ranks
from tests.support.quantized_folders import Kind, awq, fp8, gptq, of_compressed_tensors, write
from tests.support.stage_driver import run, run_all
from tests.support.tiers import first_quick
from tests.support.token_reference import quantized_tolerance

CONFIG: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
}
INT8: dict[str, Any] = {"num_bits": 8, "type": "int", "strategy": "channel"}
FP8: dict[str, Any] = {"num_bits": 8, "type": "float"}
TOKEN: dict[str, Any] = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
KINDS: dict[str, Kind] = {
    "ct-w4a16": of_compressed_tensors("pack-quantized", INT4),
    "ct-w4a16-asymmetric": of_compressed_tensors("pack-quantized", INT4 | {"symmetric": False, "group_size": 16}),
    "ct-w4a16-channel": of_compressed_tensors("pack-quantized", {"num_bits": 4, "strategy": "channel"}),
    "ct-w8a16": of_compressed_tensors("pack-quantized", INT4 | {"num_bits": 8}),
    "ct-int8": of_compressed_tensors("int-quantized", INT8),
    "ct-w8a8": of_compressed_tensors("int-quantized", INT8, TOKEN),
    "ct-int8-groups": of_compressed_tensors("naive-quantized", INT4 | {"num_bits": 8, "symmetric": False}),
    "ct-fp8-tensor": of_compressed_tensors(
        "float-quantized", FP8 | {"strategy": "tensor"}, FP8 | {"strategy": "tensor"}, {"input_scale": torch.ones(1)}
    ),
    "ct-fp8-channel": of_compressed_tensors("float-quantized", FP8 | {"strategy": "channel"}),
    "ct-fp8-block": of_compressed_tensors(
        "naive-quantized", FP8 | {"strategy": "block", "block_structure": [128, 128]}
    ),
    "ct-mxfp4": of_compressed_tensors(
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    ),
    "gptq-4": gptq(4, 32),
    "gptq-4-asymmetric": gptq(4, 16, symmetric=False),
    "gptq-4-v2": gptq(4, 32, symmetric=False, version="gptq_v2"),
    "gptq-4-act-order": gptq(4, 32, symmetric=False, act_order=True),
    "gptq-8": gptq(8, -1),
    "awq": awq(32),
    "fp8-block": fp8((32, 32), kept=("model.layers.1.mlp.down_proj",)),
    "fp8-tensor": fp8(None),
}
ROUNDED = ("ct-w8a8",)  # activations too


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, np.ndarray, np.ndarray]]:
    """Make a folder of each kind, with the reference's tokens and logits."""
    torch.set_num_threads(1)
    made = {}
    for name, kind in KINDS.items():
        torch.manual_seed(11)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).eval()
        folder = tmp_path_factory.mktemp(name)
        with torch.no_grad():
            write(folder, model, kind)
        made[name] = (folder, *reference(model, prompts_of(101)))
    return made


def check_kind(kind: str, path: Path, tokens: np.ndarray, logits: np.ndarray) -> None:
    """Check tokens and logits. Where activations are rounded, a last bit changes some by a step: logits are near."""
    if kind in ROUNDED:
        np.testing.assert_allclose(np.load(path)["logits"][:, 0], logits[:, 0], atol=0.08 * np.abs(logits).max())
    else:
        check(path, tokens, logits, quantized_tolerance())


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank(kind: str, folders: dict[str, Any], tmp_path: Path) -> None:
    folder, tokens, logits = folders[kind]
    arch = Checkpoint.open(ModelConfig(weights=str(folder))).arch
    Checkpoint.open(ModelConfig(weights=str(folder))).tensors(arch).check(arch, tensor_shapes(arch))
    with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 60) as groups:
        run(groups, job(tmp_path / "out.npz", weights=str(folder)))
    check_kind(kind, tmp_path / "out.npz", tokens, logits)


@pytest.mark.parametrize(("pp", "tp"), first_quick([(2, 2), (1, 2), (2, 1)]))
def test_meshes(pp: int, tp: int, folders: dict[str, Any], tmp_path: Path) -> None:
    jobs = [job(tmp_path / f"{name}.npz", weights=str(folder)) for name, (folder, *_) in folders.items()]
    run_ranks(run_all, pp, tp, tmp_path, jobs)
    for name, (_, tokens, logits) in folders.items():
        check_kind(name, tmp_path / f"{name}.npz", tokens, logits)
