"""The router of a layer of experts: which of them compute a token, and how much each one's output counts."""

from __future__ import annotations

from ctypes import CDLL

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...conf.experts import ExpertsConfig
from ...kernels.cpp_library import ELEMENTS, addresses, find
from .cpp import pack_words

_LEAST_SUM = 1e-20  # sigmoids may all be zero


def route(logits_TE: Tensor, experts: ExpertsConfig, correction_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return each token's experts, [T, k] int64, and what each one's output counts, [T, k] float32.

    Sources: DeepSeek-V2 (arXiv 2405.04434) for groups, DeepSeek-V3 (arXiv 2412.19437) for sigmoids with a correction.

    Args:
        logits_TE: the router's product.
        experts: the rule.
        correction_E: is added to the scores for the choice alone.
    """
    k, logits_TE = experts.experts_per_token, logits_TE.float()
    if _is_plain(experts):
        highest, picked = logits_TE.topk(k)
        weights = highest.softmax(-1)  # as good as dividing the softmax over all experts by its sum over these
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


def _is_plain(experts: ExpertsConfig) -> bool:
    """Return whether weights are the softmax of the highest logits."""
    is_softmax = experts.scores == "softmax" and experts.normalized
    return is_softmax and experts.groups == 1 and not experts.correction_bias


def _in_best_groups(choice_TE: Tensor, experts: ExpertsConfig) -> Tensor:
    """Return the scores, -inf where an expert is not of a token's best groups."""
    grouped = choice_TE.unflatten(1, (experts.groups, -1))
    of_groups = grouped.amax(-1) if experts.group_score == "highest" else grouped.topk(2).values.sum(-1)
    best = of_groups.topk(experts.top_groups).indices
    is_out = torch.ones_like(of_groups, dtype=torch.bool).scatter_(1, best, False)
    masked: Tensor = grouped.masked_fill(is_out[..., None], -torch.inf)
    return masked.flatten(1)


class ExpertRouter(nn.Module):
    """Picks each token's experts. Every rank holds all of it, so that all ranks of a stage pick the same ones."""

    def __init__(self, hidden_size: int, experts: ExpertsConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.experts = experts
        E, own = experts.num_experts, torch.float32 if experts.router_float32 else dtype
        self.weight = nn.Parameter(torch.empty(E, hidden_size, dtype=own, device=device))
        self.bias = nn.Parameter(torch.empty(E, dtype=own, device=device)) if experts.router_bias else None
        has_correction = experts.correction_bias
        self.correction = nn.Parameter(torch.empty(E, device=device)) if has_correction else None

        self._packed: Tensor | None = None

    def pack(self) -> None:
        """Lay the weight out for the choice in C++, where there is one. The weight stays: it is small."""
        weight = self.weight.detach()
        fits = weight.device.type == "cpu" and weight.dtype in ELEMENTS and weight.shape[1] % 32 == 0
        if fits and _is_plain(self.experts) and _library(weight.dtype) is not None:
            self._packed = pack_words(weight[None, None], 64)

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's experts and their weights, as `route` does."""
        if self._packed is None or x_TH.dtype != self.weight.dtype:
            return route(F.linear(x_TH.to(self.weight.dtype), self.weight, self.bias), self.experts, self.correction)
        x_TH, E, k = x_TH.contiguous(), self.experts.num_experts, self.experts.experts_per_token
        picked, weights = torch.empty(len(x_TH), k, dtype=torch.int64), torch.empty(len(x_TH), k)
        library = _library(x_TH.dtype)
        assert library is not None
        x, *rest = addresses(x_TH, self._packed, self.bias)
        library.route(x, *x_TH.shape, *rest, E, k, *addresses(picked, weights))
        return picked, weights if self.experts.scale == 1.0 else weights * self.experts.scale


def _library(dtype: torch.dtype) -> CDLL | None:
    return find("router", dtype, route="piippiipp")
