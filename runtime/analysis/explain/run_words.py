"""Values from a run's config for its sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class RunWords:
    """Config values for sentences about a run, each None if the recorded config lacks it.

    Attributes:
        policy: name of the policy.
        layers: number of layers of each stage.
        token_bytes: bytes of one token's activation between two stages.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        policy, model = _group(config, "scheduler"), _group(config, "model")
        self.policy: str | None = policy.get("name")
        layers = _group(config, "parallel").get("layers")
        self.layers: list[int] | None = None if layers is None else list(layers)
        hidden, dtype = _group(model, "architecture").get("hidden_size"), model.get("dtype")
        is_wide = dtype == "float32" or (dtype == "auto" and _group(config, "hardware").get("device") == "cpu")
        self.token_bytes: float | None = None
        if hidden is not None and dtype is not None:
            self.token_bytes = float(hidden * (4 if is_wide else 2))


def _group(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}
