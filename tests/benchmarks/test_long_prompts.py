"""A long prompt beside short requests, and alone, as `benchmarks.long_prompts` simulates them."""

from __future__ import annotations

import pytest

from benchmarks.long_prompts import LONG, MODELS, beside, run, workload


@pytest.mark.parametrize("model", MODELS)
def test_a_long_prompt_disturbs_decodes_hardly_more_than_under_sarathi(model: str) -> None:
    rows = {row["policy"]: row for row in beside(model)}
    assert rows["equal_time"]["p99_tbt_ms"] <= 1.1 * rows["sarathi"]["p99_tbt_ms"]
    assert rows["equal_time"]["long_ttft_s"] <= 1.05 * rows["sarathi"]["long_ttft_s"]


@pytest.mark.parametrize("model", MODELS)
def test_auto_is_near_the_best_fixed_chunk(model: str) -> None:
    lone = workload([LONG], [1], [0.0])
    best, auto = [
        run(model, lone, *overrides)[0].token_times[0]
        for overrides in (
            ("scheduler=sarathi", "scheduler.chunk=1024"),
            ("scheduler=equal_time", "scheduler.chunk=auto"),
        )
    ]
    assert auto <= 1.05 * best
