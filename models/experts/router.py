"""The router of an MoE layer: each token's top-k experts and their routing weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...conf.experts import ExpertsConfig

_LEAST_SUM = 1e-20  # avoids division by zero if all sigmoids are zero


def route(logits_TE: Tensor, experts: ExpertsConfig, correction_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return each token's top-k experts, [T, k] int64, and routing weights, [T, k] float32.

    Sources: DeepSeek-V2 (arXiv 2405.04434) for groups, DeepSeek-V3 (arXiv 2412.19437) for sigmoids with a correction.

    Args:
        logits_TE: the router logits.
        experts: the routing rule.
        correction_E: bias added to the scores for selection only.
    """
    k, logits_TE = experts.experts_per_token, logits_TE.float()
    is_softmax = experts.scores == "softmax" and experts.normalized
    if is_softmax and experts.groups == 1 and not experts.correction_bias:
        highest, picked = logits_TE.topk(k)
        weights = highest.softmax(-1)  # equals the softmax over all experts, renormalized over the top k
        return picked, weights if experts.scale == 1.0 else weights * experts.scale
    scores = logits_TE.softmax(-1) if experts.scores == "softmax" else logits_TE.sigmoid()
    choice = scores if correction_E is None else scores + correction_E
    if experts.groups > experts.top_groups:
        choice = _in_best_groups(choice, experts)
    picked = choice.topk(k).indices
    weights = scores.gather(1, picked)
    if experts.normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + _LEAST_SUM)
    return picked, weights if experts.scale == 1.0 else weights * experts.scale


def _in_best_groups(choice_TE: Tensor, experts: ExpertsConfig) -> Tensor:
    """Set the scores of experts outside a token's best groups to -inf."""
    grouped = choice_TE.unflatten(1, (experts.groups, -1))
    of_groups = grouped.amax(-1) if experts.group_score == "highest" else grouped.topk(2).values.sum(-1)
    best = of_groups.topk(experts.top_groups).indices
    is_out = torch.ones_like(of_groups, dtype=torch.bool).scatter_(1, best, False)
    masked: Tensor = grouped.masked_fill(is_out[..., None], -torch.inf)
    return masked.flatten(1)


class ExpertRouter(nn.Module):
    """Selects each token's top-k experts. Replicated, so that all ranks of a stage select the same experts."""

    def __init__(self, hidden_size: int, experts: ExpertsConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.experts = experts
        E, own = experts.num_experts, torch.float32 if experts.router_float32 else dtype
        self.weight = nn.Parameter(torch.empty(E, hidden_size, dtype=own, device=device))
        self.bias = nn.Parameter(torch.empty(E, dtype=own, device=device)) if experts.router_bias else None
        has_correction = experts.correction_bias
        self.correction = nn.Parameter(torch.empty(E, device=device)) if has_correction else None

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's experts and routing weights, like `route`."""
        return route(F.linear(x_TH.to(self.weight.dtype), self.weight, self.bias), self.experts, self.correction)
