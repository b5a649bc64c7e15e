"""The router picks and weighs experts as transformers' gates do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from gapless.conf.errors import ConfigError
from gapless.conf.experts import ExpertsConfig
from gapless.models.experts.router import ExpertRouter, route

H, E, K = 32, 24, 4
CPU = torch.device("cpu")
SIZES = {"hidden_size": H, "num_experts_per_tok": K}
GROUPS = {**SIZES, "n_routed_experts": E, "n_group": 6, "topk_group": 2, "routed_scaling_factor": 2.5}
Gates = dict[str, tuple[Any, dict[str, Any]]]
GATES: Gates = {
    "mixtral": (MixtralTopKRouter(transformers.MixtralConfig(**SIZES, num_local_experts=E)), {}),
    "qwen3": (
        Qwen3MoeTopKRouter(transformers.Qwen3MoeConfig(**SIZES, num_experts=E, norm_topk_prob=False)),
        {"normalized": False},
    ),
    "gpt-oss": (GptOssTopKRouter(transformers.GptOssConfig(**SIZES, num_local_experts=E)), {"router_bias": True}),
    "deepseek-v2-greedy": (
        DeepseekV2TopkRouter(transformers.DeepseekV2Config(**GROUPS, topk_method="greedy")),
        {"normalized": False, "scale": 2.5, "router_float32": True},
    ),
    "deepseek-v2": (
        DeepseekV2TopkRouter(transformers.DeepseekV2Config(**GROUPS, topk_method="group_limited_greedy")),
        {"normalized": False, "scale": 2.5, "router_float32": True, "groups": 6, "top_groups": 2},
    ),
    "deepseek-v3": (
        DeepseekV3TopkRouter(transformers.DeepseekV3Config(**GROUPS)),
        {
            "scores": "sigmoid",
            "correction_bias": True,
            "groups": 6,
            "top_groups": 2,
            "group_score": "two_highest",
            "scale": 2.5,
            "router_float32": True,
        },
    ),
    "glm4-moe": (
        Glm4MoeTopkRouter(transformers.Glm4MoeConfig(**SIZES, n_routed_experts=E)),
        {"scores": "sigmoid", "correction_bias": True, "router_float32": True},
    ),
    "minimax-m2": (
        MiniMaxM2TopKRouter(transformers.MiniMaxM2Config(**SIZES, num_local_experts=E)),
        {"scores": "sigmoid", "correction_bias": True},
    ),
}


def _dense(picked: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weights by expert, [T, E], in which the order of a token's experts is lost."""
    return torch.zeros(len(picked), E).scatter_(1, picked, weights.float())


@pytest.mark.parametrize("name", GATES)
def test_router_is_that_of_transformers(name: str) -> None:
    torch.manual_seed(0)
    gate, rule = GATES[name]
    own = ExpertRouter(H, ExpertsConfig(num_experts=E, experts_per_token=K, **rule), dtype=torch.float32, device=CPU)
    x = torch.randn(50, H)
    torch.nn.init.normal_(own.weight)
    gate.weight.data = own.weight.data
    correction = own.correction
    if own.bias is not None:
        torch.nn.init.normal_(own.bias)
        gate.bias.data = own.bias.data
    if correction is not None:
        torch.nn.init.normal_(correction, std=0.3)
        gate.e_score_correction_bias = correction.data
    with torch.inference_mode():
        _, weights, picked = gate(x, correction) if name == "minimax-m2" else gate(x)
        torch.testing.assert_close(_dense(*own(x)), _dense(picked, weights))


@given(seed=st.integers(0, 1 << 16), groups=st.sampled_from([1, 2, 4, 8]), best=st.integers(1, 8), k=st.integers(1, 6))
def test_groups_bound_the_choice_and_normalized_scores_add_up_to_their_scale(
    seed: int, groups: int, best: int, k: int
) -> None:
    best = min(best, groups)
    if best * (E // groups) < k:
        return
    rule = ExpertsConfig(
        num_experts=E, experts_per_token=k, scores="sigmoid", groups=groups, top_groups=best, scale=1.5
    )
    picked, weights = route(torch.randn(9, E, generator=torch.Generator().manual_seed(seed)), rule)
    for row in picked.tolist():
        assert len(set(row)) == k
        assert len({expert // (E // groups) for expert in row}) <= best
    torch.testing.assert_close(weights.sum(-1), torch.full((9,), 1.5))


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        ({"groups": 5}, "experts.groups=5: must be a divisor of num_experts=24"),
        ({"groups": 24, "group_score": "two_highest"}, "of 2 experts or more"),
        ({"groups": 12, "top_groups": 1}, "experts.top_groups=1: must be 1 to groups=12, with experts_per_token=4"),
        ({"scale": 0.0}, "experts.scale=0.0: must be above 0"),
        ({"ffn_size": 0}, "experts.ffn_size=0: must be null or 1"),
    ],
)
def test_a_rule_that_cannot_be_is_refused_by_key(rule: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ExpertsConfig(num_experts=E, experts_per_token=K, **rule)
