"""Reads the rotary embedding's parameters from a config.json, by the rules of transformers 5.

Source: `convert_rope_params_to_dict` and `standardize_rope_params` of `modeling_rope_utils.py` in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..conf.architecture import RopeScaling
from ..conf.errors import ConfigError
from .model_config import ModelValues

_HARMLESS = ("finetuned",)  # in early YaRN models


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary embedding of a model, or of its layers of a kind."""

    theta: float
    scaling: RopeScaling | None
    turned: float = 1.0  # rotary fraction of a head


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeKeys:
    """A family's keys and defaults for the rotary embedding.

    Attributes:
        theta: top-level key of theta.
        default_theta: if the key is missing.
        turned: top-level key of the rotary fraction of a head.
        default_turned: if the key is missing; None: the family rotates whole heads.
        original: the training context length if no key specifies it; None: the model's maximum.
        kinds: names of `rope_type` and their meanings; None: the names of `RopeScaling`.
    """

    theta: str = "rope_theta"
    default_theta: float = 10000.0
    turned: str = "partial_rotary_factor"
    default_turned: float | None = None
    original: int | None = None
    kinds: Mapping[str, str] | None = None


def read_rope(config: ModelValues, keys: RopeKeys, *, max_position: int) -> Rope:
    """Read theta, the scaling and the rotary fraction.

    `rope_scaling` takes precedence over `rope_parameters` (transformers 5), and keys inside it over top-level keys.
    `dynamic` is ignored: it changes nothing up to `max_position`, and longer prompts are rejected.
    """
    old, new = config.part("rope_scaling"), config.part("rope_parameters")
    rope = old if old.values else new
    turned = 1.0 if keys.default_turned is None else keys.default_turned
    for each, key in ((config, keys.turned), (rope, "partial_rotary_factor")):
        if keys.default_turned is not None:
            turned = each.number(key, turned)
        elif each.get(key, 1.0) != 1.0:
            raise config.unsupported(f"{each.within}{key}={each.get(key)!r}")
    if turned > 1:
        raise ConfigError(f"{config.path}: {keys.turned}={turned:g}: must be at most 1")
    return replace(read_scaling(config, rope, keys, max_position=max_position), turned=turned)


def read_scaling(config: ModelValues, rope: ModelValues, keys: RopeKeys, *, max_position: int) -> Rope:
    """Read theta and the scaling from the object `rope`, or theta from the top level. The scaling may be None."""
    theta = rope.number("rope_theta", config.number(keys.theta, keys.default_theta))
    kind = str(rope.values.get("rope_type", rope.values.get("type", "default")))
    rope.asked |= {"rope_type", "type"}
    if keys.kinds is not None:
        kind = keys.kinds.get(kind, f"{kind} of this model")
    scaling = _scaling(kind, config, rope, keys, max_position, theta)
    rope.refuse_others(_HARMLESS)
    return Rope(theta, scaling)


def _scaling(
    kind: str, config: ModelValues, rope: ModelValues, keys: RopeKeys, max_position: int, theta: float
) -> RopeScaling | None:
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
            original_max_position=_original(config, rope, keys, max_position),
        )
    if kind == "yarn":
        return _yarn(config, rope, keys, max_position, theta)
    if kind == "longrope":
        return _longrope(config, rope, keys, max_position)
    raise config.unsupported(f"rope scaling of rope_type={kind} (supported: linear, dynamic, yarn, llama3, longrope)")


def _original(config: ModelValues, rope: ModelValues, keys: RopeKeys, max_position: int) -> int:
    """Return the training context length: from the top level, else the family's, else from `rope`, else the model's."""
    inside = rope.positive("original_max_position_embeddings", max_position)
    return config.positive("original_max_position_embeddings", keys.original or inside)


def _longrope(config: ModelValues, rope: ModelValues, keys: RopeKeys, max_position: int) -> RopeScaling:
    original = _original(config, rope, keys, max_position)
    factor = rope.number("factor") if rope.get("factor") is not None else max_position / original
    factors = {}
    for key in ("long_factor", "short_factor"):
        value = rope.get(key)
        if not isinstance(value, list) or not all(isinstance(x, int | float) and x > 0 for x in value):
            raise rope.wrong(key, "a list of numbers above 0")
        factors[key] = tuple(float(x) for x in value)
    grown = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeScaling(
        type="longrope",
        original_max_position=original,
        factors=factors["long_factor"],
        short_factors=factors["short_factor"],
        attention_factor=grown if rope.get("attention_factor") is None else rope.number("attention_factor"),
    )


def _yarn(config: ModelValues, rope: ModelValues, keys: RopeKeys, max_position: int, theta: float) -> RopeScaling:
    if theta == 1:
        raise ConfigError(f"{config.path}: rope_theta={theta:g}: must not be 1 with yarn")
    original = _original(config, rope, keys, max_position)
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
