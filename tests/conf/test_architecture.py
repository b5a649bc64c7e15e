"""What sets layers apart is checked, and a plain model is described as it was without it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gapless.conf.architecture import Architecture, LayerKind
from gapless.conf.build import build, to_mapping
from gapless.conf.errors import ConfigError
from gapless.runtime.simulation.cost.profile_folder import shape_of

PLAIN = Architecture(
    vocab_size=64, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, ffn_size=48, max_position=64
)


def test_a_kind_of_layers_has_its_fields_or_those_of_all() -> None:
    windowed = dataclasses.replace(PLAIN, sliding_window=9, rope_theta=500.0)
    assert windowed.kinds == {LayerKind(window=9, rope_theta=500.0): 3}
    assert windowed.kind(2) == LayerKind(window=9, rope_theta=500.0)
    full, own = LayerKind(rope_theta=10.0), LayerKind(window=4, rope=False)
    mixed = dataclasses.replace(PLAIN, layers=(own, full, own))
    assert mixed.kinds == {own: 2, full: 1}
    assert [mixed.kind(i) for i in range(3)] == [own, full, own]
    assert build(Architecture, to_mapping(mixed)) == mixed


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layers": (LayerKind(),) * 2}, "layers=2: must be empty or one per layer (num_layers=3)"),
        ({"rotary_dim": 3}, "rotary_dim=3: must be null or an even number up to head_dim=8"),
        ({"rotary_dim": 10}, "rotary_dim=10: must be"),
        ({"attention_scale": 0.0}, "attention_scale=0.0: must be null or above 0"),
        ({"logit_softcap": -1.0}, "logit_softcap=-1.0: must be null or above 0"),
        ({"residual_scale": 0.0}, "residual_scale=0.0: must be above 0"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_key(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(PLAIN, **change)
    assert str(caught.value).startswith(f"model.architecture.{said}")


def test_a_window_of_a_layer_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"layers\.window=0: must be null or 1 or more"):
        LayerKind(window=0)


def test_profiles_of_plain_models_hold_no_key_of_others() -> None:
    plain, odd = shape_of(PLAIN), shape_of(dataclasses.replace(PLAIN, norms="both", layers=(LayerKind(window=4),) * 3))
    assert set(odd) - set(plain) == {"norms", "windows"}
    assert odd["windows"] == [[4, 3]]
    assert plain == shape_of(dataclasses.replace(PLAIN, family="gpt2", embedding_scale=2.0, rotary_dim=4))
