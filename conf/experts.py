"""The experts of a mixture-of-experts model: `model.architecture.experts.KEY=VALUE`."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import check

_KEY = "model.architecture.experts"
_MAX_EXPERTS = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The experts that every layer has in place of a feed-forward block. `ffn_size` is the inner width of each."""

    num_experts: int
    """E, experts of each layer, of which a router picks some for each token"""
    experts_per_token: int
    """k, experts that the router picks for a token"""
    shared_ffn_size: int = 0
    """inner width of the shared expert, which computes every token beside the picked ones; 0: there is none"""

    def __post_init__(self) -> None:
        count, picked = self.num_experts, self.experts_per_token
        check(f"{_KEY}.num_experts", count, 1 <= count <= _MAX_EXPERTS, f"1 to {_MAX_EXPERTS}")
        check(f"{_KEY}.experts_per_token", picked, 1 <= picked <= count, f"1 to num_experts={count}")
        check(f"{_KEY}.shared_ffn_size", self.shared_ffn_size, 0 <= self.shared_ffn_size < 1 << 31, "0 to 2147483647")
