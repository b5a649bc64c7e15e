"""Experts and router of a mixture-of-experts (MoE) model: `model.architecture.experts.KEY=VALUE`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from .errors import check
from .ranges import AT_LEAST_ONE, POSITIVE, Within, check_ranges

_KEY = "model.architecture.experts"
_MAX_WIDTH = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The experts that replace a layer's feed-forward block, and the router that selects the top k per token.

    The router computes one logit per expert by a GEMM. It selects the experts with the highest scores, after adding
    the correction bias, and weights their outputs by the scores.
    """

    num_experts: Annotated[int, Within(1, 65_536)]
    """E, experts per layer"""
    experts_per_token: int
    """k, routed experts per token"""
    ffn_size: Annotated[int | None, Within(1, _MAX_WIDTH)] = None
    """inner width of each expert; null: the model's ffn_size"""
    shared_ffn_size: Annotated[int, Within(0, _MAX_WIDTH)] = 0
    """inner width of the shared expert, which computes every token; 0: none"""
    shared_gate: bool = False
    """the shared expert's output has a sigmoid gate per token (Qwen2-MoE)"""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """router scoring function: softmax over all experts, or sigmoid per expert (DeepSeek V3)"""
    router_float32: bool = False
    """compute router logits in float32 (DeepSeek)"""
    router_bias: bool = False
    """bias on the router logits (gpt-oss)"""
    correction_bias: bool = False
    """per-expert bias used for selection only, not for weighting (DeepSeek V3)"""
    groups: Annotated[int, AT_LEAST_ONE] = 1
    """expert groups (group-limited routing)"""
    top_groups: int = 1
    """groups selected per token"""
    group_score: Literal["highest", "two_highest"] = "highest"
    """score of a group: its highest expert score, or the sum of its two highest (DeepSeek V3)"""
    normalized: bool = True
    """normalize the top-k scores to sum to 1"""
    scale: Annotated[float, POSITIVE] = 1.0
    """factor of the top-k scores"""
    clamp: Annotated[float | None, POSITIVE] = None
    """clamp of an expert's gate and up projections; 1 is then added to the latter (gpt-oss); null: plain SwiGLU"""
    sigmoid_factor: float = 1.0
    """with clamp: factor of the gate inside the sigmoid"""
    bias: bool = False
    """bias on the experts' projections (gpt-oss)"""

    def __post_init__(self) -> None:
        check_ranges(self, f"{_KEY}.")
        count, picked, groups, best = self.num_experts, self.experts_per_token, self.groups, self.top_groups
        check(f"{_KEY}.experts_per_token", picked, 1 <= picked <= count, f"1 to num_experts={count}")
        least = 2 if self.group_score == "two_highest" else 1
        is_divisor = groups <= count // least and count % groups == 0
        check(f"{_KEY}.groups", groups, is_divisor, f"a divisor of num_experts={count}, of {least} experts or more")
        has_enough = 1 <= best <= groups and best * (count // groups) >= picked
        check(f"{_KEY}.top_groups", best, has_enough, f"1 to groups={groups}, with experts_per_token={picked} in them")
