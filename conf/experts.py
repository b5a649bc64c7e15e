"""The experts of a mixture-of-experts model: `model.architecture.experts.KEY=VALUE`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .errors import check

_KEY = "model.architecture.experts"
_MAX_EXPERTS = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The experts that a layer has in place of a feed-forward block, and how its router picks some for a token.

    The router scores all experts of a layer by a matrix product. It picks the highest scores, each with its correction
    added, and each picked expert's output counts by its score.
    """

    num_experts: int
    """E, experts of each layer, of which a router picks some for each token"""
    experts_per_token: int
    """k, experts that the router picks for a token"""
    ffn_size: int | None = None
    """inner width of each expert; null: the model's ffn_size"""
    shared_ffn_size: int = 0
    """inner width of the shared expert, which computes every token beside the picked ones; 0: there is none"""
    shared_gate: bool = False
    """the shared expert's output is scaled by a score of its own for each token (Qwen2-MoE)"""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """what makes scores of the router's product: softmax over all experts, or sigmoid of each (DeepSeek V3)"""
    router_float32: bool = False
    """the router's product is computed in float32 (DeepSeek)"""
    router_bias: bool = False
    """bias on the router's product (gpt-oss)"""
    correction_bias: bool = False
    """a bias of each expert that counts for the choice alone (DeepSeek V3)"""
    groups: int = 1
    """groups of neighbouring experts; a token's experts come from its best groups only"""
    top_groups: int = 1
    """groups that a token's experts may come from"""
    group_score: Literal["highest", "two_highest"] = "highest"
    """what a group is chosen by: its highest score, or the sum of its two highest (DeepSeek V3)"""
    normalized: bool = True
    """the scores of a token's experts are divided by their sum"""
    scale: float = 1.0
    """factor of the scores"""
    clamp: float | None = None
    """bound of what an expert's gate and up projection give; then it adds 1 to the latter (gpt-oss); null: SwiGLU"""
    sigmoid_factor: float = 1.0
    """clamp: factor of the gate within its sigmoid"""
    bias: bool = False
    """bias on the experts' projections (gpt-oss)"""

    def __post_init__(self) -> None:
        count, picked, groups, best = self.num_experts, self.experts_per_token, self.groups, self.top_groups
        check(f"{_KEY}.num_experts", count, 1 <= count <= _MAX_EXPERTS, f"1 to {_MAX_EXPERTS}")
        check(f"{_KEY}.experts_per_token", picked, 1 <= picked <= count, f"1 to num_experts={count}")
        width = self.ffn_size
        check(f"{_KEY}.ffn_size", width, width is None or 1 <= width < 1 << 31, "null or 1 to 2147483647")
        check(f"{_KEY}.shared_ffn_size", self.shared_ffn_size, 0 <= self.shared_ffn_size < 1 << 31, "0 to 2147483647")
        least = 2 if self.group_score == "two_highest" else 1
        is_divisor = 1 <= groups <= count // least and count % groups == 0
        check(f"{_KEY}.groups", groups, is_divisor, f"a divisor of num_experts={count}, of {least} experts or more")
        has_enough = 1 <= best <= groups and best * (count // groups) >= picked
        check(f"{_KEY}.top_groups", best, has_enough, f"1 to groups={groups}, with experts_per_token={picked} in them")
        check(f"{_KEY}.scale", self.scale, self.scale > 0, "above 0")
        check(f"{_KEY}.clamp", self.clamp, self.clamp is None or self.clamp > 0, "null or above 0")
