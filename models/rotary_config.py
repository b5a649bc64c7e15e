"""Reads theta and the scaling of rotary positions from a config.json, by the rules of transformers 5.

Source: `convert_rope_params_to_dict` and `standardize_rope_params` of `modeling_rope_utils.py` in transformers.
"""

from __future__ import annotations

import math

from ..conf.architecture import RopeScaling
from ..conf.errors import ConfigError
from .model_config import ModelValues

_HARMLESS = ("finetuned",)  # of the first YaRN models


def read_rope(config: ModelValues, *, max_position: int, default_theta: float) -> tuple[float, RopeScaling | None]:
    """Return theta and the scaling; None for none.

    `rope_scaling` goes before `rope_parameters` (transformers 5), and the theta inside before that beside them.
    `dynamic` changes nothing up to `max_position`, and longer prompts are not taken.
    """
    old, new = config.part("rope_scaling"), config.part("rope_parameters")
    rope = old if old.values else new
    theta = config.number("rope_theta", default_theta)
    theta = rope.number("rope_theta", theta)
    for each in (config, rope):
        if each.get("partial_rotary_factor", 1.0) != 1.0:
            raise config.unsupported(f"{each.within}partial_rotary_factor={each.get('partial_rotary_factor')!r}")
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    rope.asked |= {"rope_type", "type"}
    scaling = _scaling(str(kind), config, rope, max_position, theta)
    rope.refuse_others(_HARMLESS)
    return theta, scaling


def _scaling(kind: str, config: ModelValues, rope: ModelValues, max_position: int, theta: float) -> RopeScaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(type="linear", factor=rope.number("factor"))
    if kind == "dynamic":
        rope.number("factor")
        return None
    if kind == "factors" and config.path.suffix == ".gguf":
        return RopeScaling(type="factors", factors=tuple(rope.get("factors")))
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if low >= high:
            raise rope.wrong("low_freq_factor", f"below high_freq_factor={high:g}")
        return RopeScaling(
            type="llama3",
            factor=rope.number("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position=_original(config, rope, max_position),
        )
    if kind == "yarn":
        return _yarn(config, rope, max_position, theta)
    raise config.unsupported(f"rope scaling of rope_type={kind} (supported: linear, dynamic, yarn, llama3)")


def _original(config: ModelValues, rope: ModelValues, max_position: int) -> int:
    """Return the context length of the training: beside the scaling, else in it, else the model's."""
    inside = rope.positive("original_max_position_embeddings", max_position)
    return config.positive("original_max_position_embeddings", inside)


def _yarn(config: ModelValues, rope: ModelValues, max_position: int, theta: float) -> RopeScaling:
    if theta == 1:
        raise ConfigError(f"{config.path}: rope_theta={theta:g}: must not be 1 with yarn")
    original = _original(config, rope, max_position)
    factor = rope.number("factor") if rope.values.get("factor", 0) is not None else max_position / original

    def optional(key: str) -> float | None:
        return rope.number(key) if rope.get(key) else None

    numerator, denominator = optional("mscale") or 0.0, optional("mscale_all_dim") or 0.0
    if not (numerator and denominator):
        numerator, denominator = 1.0, 0.0
    grown = 0.1 * math.log(max(factor, 1.0))
    given = rope.get("attention_factor")
    return RopeScaling(
        type="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=optional("beta_fast") or 32.0,
        beta_slow=optional("beta_slow") or 1.0,
        truncate=rope.flag("truncate", True),
        attention_factor=(numerator * grown + 1) / (denominator * grown + 1)
        if given is None
        else rope.number("attention_factor"),
    )
