"""Every policy over a pool that frees blocks behind windows: no key is missing, and no block is lost or shared."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.models.block_groups import Windows, blocks_held
from gapless.runtime.scheduler.policies import POLICIES, find_policy
from tests.runtime.scheduler.test_schedulers import WORKLOAD, check_run, config_of, run, workloads
from tests.support.tiers import examples

WINDOWS: list[Windows] = [(5,), (None, 1), (None, 9), (None, 13, 13), (6, 6, 30), (None, None, 20)]


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=examples(100))
@given(
    w=workloads(),
    windows=st.sampled_from(WINDOWS),
    room=st.sampled_from([0, 1, 3, 10, 40]),
    looks_ahead=st.booleans(),
)
def test_every_key_within_a_window_is_there(
    policy: str, w: dict, windows: Windows, room: int, looks_ahead: bool
) -> None:
    promised = windows if find_policy(config_of(policy, w)).cuts_prompts else (None,) * len(windows)
    w |= {"windows": windows, "num_blocks": blocks_held(w["max_len"], promised, w["block_size"]) + room}
    if looks_ahead:
        w |= {"stages": 1, "extra_depth": 0, "penalized": 1, "looks_ahead": True}
    check_run(*run(policy, w))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_outputs_are_those_without_freeing(policy: str, windows: Windows) -> None:
    w = {
        **WORKLOAD,
        "prefix_caching": True,
        "alike": 40,
        "requests": [(prompt, 30, 0.02 * i, True) for i, prompt in enumerate((80, 41, 60, 7, 90, 55, 80, 41))],
    }
    _, _, expected = run(policy, w)
    promised = windows if find_policy(config_of(policy, w)).cuts_prompts else (None,) * len(windows)
    tight = {"windows": windows, "num_blocks": blocks_held(120, promised, 4) + 4}
    _, _, requests = run(policy, w | tight)
    assert [r.output for r in requests] == [r.output for r in expected]
