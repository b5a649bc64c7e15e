"""How `benchmarks.every_policy` says which policy wins, and where `equal_time` is behind."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.every_policy import AT_ONCE, OWN, Cell, Grid, compare, counts, flags, means, simulate_cell, trades


def row(policy: str, requests: float = 10.0, ttft: float = 100.0, tbt: float = 50.0, **other: Any) -> dict[str, Any]:
    return {
        "cluster": "c",
        "workload": "w",
        "load": "50%",
        "seed": 0,
        "policy": policy,
        "requests_per_s": requests,
        "p50_ttft_s": ttft / 2,
        "p99_ttft_s": ttft,
        "p99_tbt_ms": tbt,
        "inner_idle_share": 0.02,
        **other,
    }


def cell(*rows: dict[str, Any]) -> dict[str, Any]:
    (found,) = compare(rows, OWN)
    return found


def test_only_those_that_carry_as_much_are_rivals() -> None:
    found = cell(row(OWN, 10.0), row("sarathi", 9.8, ttft=10.0, tbt=10.0), row("token_budget", 9.95, ttft=80.0))
    assert found["p99_ttft_ratio"] == pytest.approx(100 / 80)
    assert (found["ttft_by"], found["shortest_p99_ttft_s"]) == ("token_budget", 80.0)
    assert flags(found) == "FD"


def test_a_policy_that_queues_requests_for_long_is_no_rival() -> None:
    found = cell(row(OWN), row("request_level", ttft=1001.0, tbt=20.0), row("sarathi"))
    assert (flags(found), found["tbt_by"]) == ("", OWN)
    assert flags(cell(row(OWN), row("request_level", ttft=999.0, tbt=20.0))) == "B"


def test_each_flag() -> None:
    assert flags(cell(row(OWN), row("sarathi", 10.2))) == "T"
    assert flags(cell(row(OWN), row("sarathi", tbt=47.0, ttft=101.0))) == "B"
    assert flags(cell(row(OWN), row("sarathi", tbt=47.0))) == "BD"
    assert flags(cell(row(OWN), row("sarathi", inner_idle_share=0.014))) == "I"
    assert flags(cell(row(OWN), row("sarathi", 9.0, ttft=1.0, tbt=1.0, inner_idle_share=0.0))) == ""


def test_counts_and_trades_are_over_the_cells() -> None:
    rows = [row(OWN), row("sarathi", ttft=50.0), row(OWN, workload="x"), row("sarathi", ttft=200.0, workload="x")]
    found = counts(compare(rows, OWN))
    assert (found["cells"], found["TTFT"], found["TBT"], found["not dominated"]) == (2, 1, 2, 1)
    assert trades(rows) == [
        {
            "policy": "sarathi",
            "load": "50%",
            "requests_per_s_ratio": pytest.approx(1),
            "p99_ttft_ratio": pytest.approx(1),
            "p99_tbt_ratio": pytest.approx(1),
        }
    ]


def test_seeds_are_averaged() -> None:
    (mean,) = means([row(OWN, 8.0), row(OWN, 12.0, seed=1)])
    assert mean["requests_per_s"] == 10.0


def test_a_cell_with_long_prompts_runs_under_every_policy() -> None:
    rows = simulate_cell(Grid(None, 12, ()), Cell("llama-13b pp2", "long", AT_ONCE, 3), None)
    assert len({row["policy"] for row in rows}) == 10
    assert all(row["p99_ttft_s"] > 1 for row in rows)
