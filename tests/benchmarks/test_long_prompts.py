"""A long prompt beside short requests, and alone, as `benchmarks.long_prompts` simulates them."""

from __future__ import annotations

import pytest

from benchmarks.long_prompts import LONG, MODELS, beside, run, workload


@pytest.mark.parametrize("model", MODELS)
def test_chunks_that_grow_or_not_beat_sarathi_in_first_tokens_or_in_decodes(model: str) -> None:
    rows = {row["policy"]: row for row in beside(model)}
    sarathi, grown, alike = rows["sarathi"], rows["equal_time"], rows["equal_time, iterations=null"]
    assert grown["long_ttft_s"] < sarathi["long_ttft_s"]
    assert grown["p50_ttft_s"] < 0.9 * sarathi["p50_ttft_s"]
    assert alike["p99_tbt_ms"] <= 1.1 * sarathi["p99_tbt_ms"]
    assert alike["long_ttft_s"] <= 1.05 * sarathi["long_ttft_s"]


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
