"""EXAONE 4: norms after attention and feed-forward; where some layers have windows, the others have no positions."""

from __future__ import annotations

from typing import Any

from ..model_config import ModelValues
from .common import rotary, windows
from .family import Family
from .olmo import NORMS_AFTER


def _exaone4(config: ModelValues) -> dict[str, Any]:
    config.positive("num_key_value_heads", 32)  # null is not allowed
    fields = rotary(config, default_heads=32, default_max=2048, eps=("rms_norm_eps", 1e-5))
    window = config.positive_or_null("sliding_window", 4096)
    pattern = config.get("sliding_window_pattern", 4)
    if not isinstance(pattern, str) or config.get("layer_types") is None:  # which goes first
        pattern = config.positive_or_null("sliding_window_pattern", 4) or 4
    kinds = windows(config, fields, window, lambda i: (i + 1) % pattern != 0, full_turns=window is None)
    return fields | {"norms": "after", "qk_norm": True} | kinds


EXAONE4 = Family(
    name="exaone4",
    readers={"exaone4": ("Exaone4ForCausalLM", _exaone4)},
    names=NORMS_AFTER,
    about="EXAONE 4.0",
)
