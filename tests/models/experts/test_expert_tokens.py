"""Models of experts give the tokens and logits of `transformers`, on one rank and on several, sliced and whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from gapless.parallel.groups import Groups
from gapless.parallel.mesh import Mesh
from gapless.parallel.rendezvous import Rendezvous
from tests.support.forked_ranks import run_ranks
from tests.support.stage_driver import run, run_all
from tests.support.token_reference import check, job, make_folders

COMMON: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 3, "moe_intermediate_size": 20}
LATENT: dict[str, Any] = {
    **COMMON | {"num_key_value_heads": 4},
    **EXPERTS,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
FAMILIES: dict[str, transformers.PretrainedConfig] = {
    "mixtral": transformers.MixtralConfig(**COMMON, num_local_experts=6, num_experts_per_tok=2, sliding_window=11),
    "qwen2-moe": transformers.Qwen2MoeConfig(
        **COMMON, **EXPERTS, num_experts=8, shared_expert_intermediate_size=28, mlp_only_layers=[1]
    ),
    "qwen3-moe": transformers.Qwen3MoeConfig(
        **COMMON, **EXPERTS, num_experts=8, head_dim=16, decoder_sparse_step=2, norm_topk_prob=True
    ),
    "deepseek-v2": transformers.DeepseekV2Config(
        **LATENT | {"q_lora_rank": None},
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        attention_bias=True,
    ),
    "deepseek-v2-yarn": transformers.DeepseekV2Config(**LATENT, topk_method="greedy", rope_parameters=YARN),
    "deepseek-v3": transformers.DeepseekV3Config(
        **LATENT, n_group=4, topk_group=2, routed_scaling_factor=2.5, rope_parameters=YARN
    ),
    "glm4-moe": transformers.Glm4MoeConfig(
        **COMMON, **EXPERTS, n_routed_experts=8, head_dim=16, use_qk_norm=True, attention_bias=True, n_shared_experts=2
    ),
    "minimax-m2": transformers.MiniMaxM2Config(
        **COMMON, num_experts_per_tok=3, num_local_experts=8, head_dim=16, rotary_dim=8
    ),
    "gpt-oss": transformers.GptOssConfig(
        **COMMON, num_experts_per_tok=3, num_local_experts=8, head_dim=16, sliding_window=9, swiglu_limit=1.5
    ),
}
GRIDS = [
    (1, 2, {"chunks": [5, 3]}),
    (1, 2, {"chunks": [5, 3], "whole_experts": True, "plain": True}),
    pytest.param(2, 2, {"layers": [1, 2], "whole_experts": True}, marks=pytest.mark.slow),
    pytest.param(2, 1, {"layers": [2, 1]}, marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, np.ndarray, np.ndarray]]:
    return make_folders(FAMILIES, tmp_path_factory)


@pytest.mark.parametrize(("chunks", "scattered"), [([64], False), ([7], True), ([5, 3], True)])
@pytest.mark.parametrize("name", FAMILIES)
def test_one_rank(name: str, chunks: list[int], scattered: bool, folders: dict[str, Any], tmp_path: Path) -> None:
    folder, tokens, logits = folders[name]
    each = job(tmp_path / "out.npz", weights=str(folder), chunks=chunks, scattered=scattered, plain=chunks == [7])
    torch.set_num_threads(1)
    with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 60) as groups:
        run(groups, each)
    check(tmp_path / "out.npz", tokens, logits)


@pytest.mark.parametrize(("pp", "tp", "over"), GRIDS)
def test_meshes(pp: int, tp: int, over: dict[str, Any], folders: dict[str, Any], tmp_path: Path) -> None:
    """Ranks have slices of the experts, or whole ones."""
    jobs = [job(tmp_path / f"{name}.npz", weights=str(folders[name][0]), **over) for name in folders]
    run_ranks(run_all, pp, tp, tmp_path, jobs)
    for name, (_, tokens, logits) in folders.items():
        check(tmp_path / f"{name}.npz", tokens, logits)
