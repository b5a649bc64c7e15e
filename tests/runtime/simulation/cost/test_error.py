"""How far stage times may be off: as a device states it, as a profile shows it, and over stages of several kinds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.conf.build import build, group_names, load_group, load_hardware
from gapless.conf.costs import ErrorConfig
from gapless.conf.errors import ConfigError
from gapless.conf.schema import SimulateConfig
from gapless.runtime.simulation.cost.error import CostError, error_text, widest
from gapless.runtime.simulation.pipeline.make_costs import make_error
from gapless.runtime.simulation.pipeline.setting import make_setting

SHARES = st.floats(-0.5, 2.0)
ERRORS = st.builds(lambda a, b, source: CostError(min(a, b), max(a, b), source), SHARES, SHARES, st.sampled_from("abc"))


def simulated(**simulation: object) -> SimulateConfig:
    return build(
        SimulateConfig,
        {
            "model": load_group("model", "llama-7b"),
            "hardware": load_group("hardware", "a100-80g"),
            "parallel": {"tp": 1, "pp": 2, "launcher": "ray"},
            "simulation": simulation,
        },
    )


@given(st.lists(ERRORS, min_size=1, max_size=4))
def test_the_widest_holds_all(errors: list[CostError]) -> None:
    found = widest(errors)
    assert found is not None
    assert all(found.low <= error.low and error.high <= found.high for error in errors)
    assert {found.low, found.high} <= {share for error in errors for share in (error.low, error.high)}
    assert found.source.split("; ") == list(dict.fromkeys(error.source for error in errors))
    assert widest([*errors, None]) is None


def test_percentiles_of_ratios() -> None:
    error = CostError.from_ratios([0.9 + 0.02 * number for number in range(11)], "eleven times")
    assert (error.low, error.high) == pytest.approx((-0.08, 0.08))
    assert error.text == "stage times may be off by -8% to +8% (eleven times)"
    assert "unknown" in error_text(None)


@pytest.mark.parametrize("name", [name for name in group_names("hardware") if load_hardware(name).costs is not None])
def test_every_device_with_constants_states_its_error(name: str) -> None:
    costs = load_hardware(name).costs
    assert costs is not None
    assert costs.error is not None
    assert costs.error.low < 0 < costs.error.high
    assert costs.error.source


def test_stages_on_several_devices_have_the_widest_error() -> None:
    own, both = simulated(), simulated(devices=["a100-80g", "h100"])
    a100, h100 = (load_hardware(name).costs for name in ("a100-80g", "h100"))
    assert a100 is not None
    assert h100 is not None
    assert a100.error is not None
    assert h100.error is not None
    setting = make_setting(own)
    assert setting.error == CostError.of(a100.error)
    found = make_error(both, setting.plan)
    assert found is not None
    assert (found.low, found.high) == (min(a100.error.low, h100.error.low), max(a100.error.high, h100.error.high))
    unknown = replace(own, hardware=replace(own.hardware, costs=replace(a100, error=None)))
    assert make_error(unknown, setting.plan) is None


@pytest.mark.parametrize(
    ("low", "high", "key"), [(-1.0, 0.2, "low"), (0.1, 0.05, "high"), (-0.1, 11.0, "high"), (1.5, 2.0, "low")]
)
def test_an_error_that_cannot_be_is_refused(low: float, high: float, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^hardware\.costs\.error\.{key}="):
        ErrorConfig(low=low, high=high, source="a guess")
