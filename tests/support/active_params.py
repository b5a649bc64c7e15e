"""How many parameters of a model of experts compute a token, as its makers publish."""

from __future__ import annotations

from gapless.conf.architecture import Architecture


def active_params(arch: Architecture) -> int:
    """Return the number of all parameters but those of the experts that a token is not routed to."""
    assert arch.experts is not None
    idle = arch.experts.num_experts - arch.experts.experts_per_token
    return arch.num_params - arch.expert_layers * idle * arch.expert_params
