"""EXAONE 4: norms after attention and feed-forward; if some layers have windows, the others have no positions."""

from __future__ import annotations

from dataclasses import replace

from ...conf.architecture import Architecture
from ..model_config import ModelValues
from .common import rotary_decoder, windows
from .family import Family
from .olmo import NORMS_AFTER


def _exaone4(config: ModelValues) -> Architecture:
    config.positive("num_key_value_heads", 32)  # null is not allowed
    arch = rotary_decoder(config, default_heads=32, default_max=2048, eps=("rms_norm_eps", 1e-5))
    window = config.positive_or_null("sliding_window", 4096)
    pattern = config.get("sliding_window_pattern", 4)
    if not isinstance(pattern, str) or config.get("layer_types") is None:  # layer_types takes precedence
        pattern = config.positive_or_null("sliding_window_pattern", 4) or 4
    arch = replace(arch, norms="after", qk_norm=True)
    return windows(config, arch, window, lambda i: (i + 1) % pattern != 0, full_turns=window is None)


EXAONE4 = Family(
    name="exaone4",
    readers={"exaone4": ("Exaone4ForCausalLM", _exaone4)},
    names=NORMS_AFTER,
    about="EXAONE 4.0",
)
