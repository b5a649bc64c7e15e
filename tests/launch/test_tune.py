"""`gapless capacity` and `gapless tune` in this process: what they print and leave, and that its commands hold."""

from __future__ import annotations

import html
import io
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gapless.conf.errors import ConfigError
from gapless.conf.policies import EqualTimeConfig, OrcaBestConfig, SarathiConfig, TokenBudgetConfig
from gapless.conf.schema import BenchConfig, SimulateConfig
from gapless.conf.tuning import SearchConfig, TuneConfig
from gapless.launch import compose
from gapless.launch.cli import main
from gapless.launch.overrides import command_line, overrides
from gapless.runtime.analysis.drawing.text_table import TextTable

REQUESTS = ["workload=fixed", "workload.input_len=600", "workload.output_len=10", "workload.num_prompts=50"]
SMALL = ["model=llama-7b", *REQUESTS]
TWO = ["cluster.devices_per_node=2", "slo.ttft_p99_ms=500", "slo.tbt_p99_ms=60"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def composed(cls: type[Any], command: str, *words: str) -> Any:
    return compose.compose_one(words, cls, command)


def loaded(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def test_tune_answers_and_its_command_does_what_it_says(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    chosen = ["scheduler=sarathi,orca_best", "search.chunk=[256,1024]", "search.finalists=2", "seeds=2"]
    asked = ["precision=0.03", "workload.request_rate=3", "hydra.run.dir=out"]
    assert main(["tune", *SMALL, *TWO, *chosen, *asked]) == 0
    printed = capfd.readouterr().out
    out = here / "out"
    assert {path.name for path in out.iterdir()} == {".hydra", "tune.json", "report.html", "figures"}
    assert {path.name for path in (out / "figures").iterdir()} >= {"rate_against_tbt.png", "rate_against_ttft.png"}
    told = loaded(out / "tune.json")
    winner = told["winner"]
    assert 2 <= len(winner["by_seed"]) <= 4
    assert told["asked_rate"] == 3.0
    assert told["tried"][0]["setting"]
    assert winner["setting"] in printed
    verdicts = [finalist["verdict"] for finalist in told["finalists"]]
    assert verdicts.count("best") == 1
    tied = [f["setting"] for f in told["finalists"] if f["verdict"] != "less"]
    assert told["ties"] == (tied if len(tied) > 1 else [])
    for finalist in told["finalists"]:
        assert finalist["if_times_are_off"]["low"] <= finalist["mean"] <= finalist["if_times_are_off"]["high"]
    assert told["cost_error"]["low"] < 0 < told["cost_error"]["high"]
    assert "error    stage times may be off by " in printed
    assert "Which chunk size" in printed or "orca_best" in winner["setting"]
    for command in told["commands"].values():
        assert f"  {command}\n" in printed

    simulated = told["commands"]["simulates it at the first seed's rate"]
    name, command, *words = shlex.split(simulated)
    assert (name, command) == ("gapless", "simulate")
    assert main(["simulate", *words, "hydra.run.dir=again"]) == 0
    summary = loaded(here / "again" / "summary.json")
    assert summary["p99_ttft_ms"] == pytest.approx(winner["p99_ttft_ms"])
    assert summary["p99_itl_ms"] == pytest.approx(winner["p99_itl_ms"])
    assert summary["p99_ttft_ms"] <= 500
    assert summary["p99_itl_ms"] <= 60
    real = next(command for what, command in told["commands"].items() if "real" in what)
    assert composed(BenchConfig, "bench", *shlex.split(real)[2:]).parallel.world_size in (1, 2)
    page = (out / "report.html").read_text(encoding="utf-8")
    assert winner["setting"] in page
    assert "http" not in page.replace("http://www.w3.org", "")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_long_setting_is_broken_between_words_and_not_cut(width: int) -> None:
    setting = "1. tp4 pp1 x2 equal_time chunk=1024 batch=196 depth=3 layers=[41,39] whole experts"
    row = (setting, "2.79 ± 0.31", "6", "the queue grows: TTFT rises by 709 ms at 2.33")
    rows = TextTable(("setting", "requests/s", "seeds", "why"), [row], "", ("setting", "why"), ("seeds",))
    console = Console(width=width, file=io.StringIO())
    console.print(rows)
    printed = console.file.getvalue()
    assert max(map(len, printed.splitlines())) <= width
    assert set(f"{setting} 2.79 ± 0.31 {row[3]}".split()) <= set(printed.split())


def test_capacity_of_two_policies(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    chosen = ["parallel=local", "scheduler=sarathi,orca_best", "seeds=2", "precision=0.05", *TWO]
    assert main(["capacity", *SMALL, *chosen, "workload.request_rate=0.01", "hydra.run.dir=out"]) == 0
    printed = capfd.readouterr().out
    assert "asked    0.01 requests/s: carried by sarathi, orca_best\n" in printed
    assert loaded(here / "out" / "capacity.json")["asked_rate"] == 0.01
    told = loaded(here / "out" / "capacity.json")["capacities"]
    assert [row["policy"] for row in told] == ["sarathi", "orca_best"]
    for row in told:
        assert 2 <= len(row["by_seed"]) <= 4
        assert row["mean"] == pytest.approx(sum(row["by_seed"]) / len(row["by_seed"]))
        assert row["p99_ttft_ms"] <= 500
        assert row["limit"]
        assert 0 < row["if_times_are_off"]["low"] < row["mean"] < row["if_times_are_off"]["high"]
    error = loaded(here / "out" / "capacity.json")["cost_error"]
    assert f"stage times may be off by {error['low']:+.0%} to {error['high']:+.0%} ({error['source']})" in printed
    lines = re.findall(r"^simulates (.+) at the first seed's rate:\n  (gapless simulate .*)", printed, re.MULTILINE)
    assert [label for label, _ in lines] == ["sarathi", "orca_best"]
    first, second = told
    pairs = list(zip(first["by_seed"], second["by_seed"], strict=False))
    less = max(told, key=lambda row: row["less_than_best"]["mean"])["less_than_best"]
    assert less["mean"] == pytest.approx(abs(sum(a - b for a, b in pairs)) / len(pairs))
    other, best = sorted(told, key=lambda row: row["mean"])
    assert [other["verdict"], best["verdict"]] == ["less", "best"]
    sentence = r"^best: (\S+) with (\S+) requests/s, (\S+) ± \S+ more than (\S+) \((\d+) seeds, 95%\)$"
    (said,) = re.findall(sentence, printed, re.MULTILINE)
    assert (said[0], said[3], int(said[4])) == (best["policy"], other["policy"], len(pairs))
    assert float(said[1]) == pytest.approx(best["mean"], rel=0.01)
    assert float(said[2]) == pytest.approx(less["mean"], rel=0.02)
    again = composed(SimulateConfig, "simulate", *shlex.split(lines[1][1])[2:])
    assert again.scheduler == OrcaBestConfig()
    assert again.workload.request_rate == told[1]["by_seed"][0]


def test_an_slo_that_no_setting_meets_has_its_own_code_and_says_what_came_closest(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    capacity = ["capacity", *SMALL, "parallel=local", "scheduler=sarathi,orca_best", "seeds=1"]
    assert main([*capacity, "slo.tbt_p99_ms=1", "hydra.run.dir=a"]) == 3
    printed = capfd.readouterr().out
    assert "a single decode takes" in printed
    (line,) = [line for line in printed.splitlines() if line.startswith("no setting meets the SLO at any rate")]
    told = loaded(here / "a" / "capacity.json")["closest"]
    assert {one["setting"] for one in told} == {"sarathi", "orca_best"}
    assert f"closest: {told[0]['setting']} at " in line
    assert "over slo.tbt_p99_ms=1 (" in line
    assert "within slo.ttft_p99_ms=2000" in line

    tune = ["tune", *SMALL, *TWO, "search.chunk=[256]", "scheduler=sarathi"]
    assert main([*tune, "slo.tbt_p99_ms=1", "slo.ttft_p99_ms=2", "hydra.run.dir=b"]) == 3
    printed = capfd.readouterr().out
    assert "a single decode takes" in printed
    (line,) = [line for line in printed.splitlines() if line.startswith("no setting meets the SLO at any rate")]
    told = loaded(here / "b" / "tune.json")
    assert told["winner"] is None
    near = told["closest"]
    worst = [max(tail["times"] for tail in one["tails"].values()) for one in near]
    assert worst == sorted(worst)
    assert set(near[0]["tails"]) == {"slo.tbt_p99_ms", "slo.ttft_p99_ms"}
    for key, tail in near[0]["tails"].items():
        assert f"over {key}=" in line
        assert tail["over_ms"] == pytest.approx(tail["p99_ms"] - tail["bound_ms"])
        assert tail["over_ms"] > 0
    page = (here / "b" / "report.html").read_text(encoding="utf-8")
    assert html.escape(line) in page
    assert "The closest settings" in page


def test_a_closed_loop_needs_no_slo_and_is_not_searched_for_a_rate(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    loop = ["workload.max_concurrency=8", "workload.warmup_requests=8", "slo.ttft_p99_ms=null", "slo.tbt_p99_ms=null"]
    policies = "scheduler=orca_best,token_budget"
    assert main(["capacity", *SMALL, "parallel=tp2", policies, *loop, "hydra.run.dir=out"]) == 0
    assert "capacity: fixed, 8 clients, 50 requests" in capfd.readouterr().out
    found = {row["policy"]: row for row in loaded(here / "out/capacity.json")["capacities"]}
    for policy, row in found.items():
        assert row["simulations"] == len(row["by_seed"])
        assert row["limit"] == "all clients wait for answers"
        run = ["simulate", *SMALL, "parallel=tp2", f"scheduler={policy}", *loop[:2], f"hydra.run.dir={policy}"]
        assert main(run) == 0
        told = loaded(here / policy / "summary.json")
        assert row["by_seed"][0] == pytest.approx(told["request_throughput"], rel=1e-3)
    off = found["token_budget"]["if_times_are_off"]
    assert off["low"] < found["token_budget"]["mean"] < off["high"]
    assert main(["capacity", *SMALL, "parallel=tp2", *loop[:3], "slo.tbt_p99_ms=1", "hydra.run.dir=none"]) == 3


def test_settings_that_cannot_be_told_apart_are_named_as_a_tie(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["parallel=local", "scheduler=sarathi,equal_time", "seeds=1", "precision=0.05"]
    assert main(["capacity", *SMALL, *words, *TWO, "hydra.run.dir=a"]) == 0
    printed = capfd.readouterr().out
    told = loaded(here / "a" / "capacity.json")
    assert told["ties"] == ["sarathi", "equal_time"]  # a single seed tells nothing apart
    assert "2 settings cannot be told apart on 1 seed: sarathi; equal_time. They differ by " in printed
    assert told["ties_note"] in printed
    assert {row["verdict"] for row in told["capacities"]} == {"best", "tie"}

    search = ["cluster.devices_per_node=1", "search.chunk=[512,1024]", "scheduler=sarathi,equal_time", "seeds=1"]
    slo = ["slo.ttft_p99_ms=500", "slo.tbt_p99_ms=60", "precision=0.05", "search.finalists=3"]
    assert main(["tune", *SMALL, *search, *slo, "search.exhaustive=true", "hydra.run.dir=b"]) == 0
    printed = capfd.readouterr().out
    told = loaded(here / "b" / "tune.json")
    assert len(told["ties"]) >= 2
    assert told["winner"]["setting"] == told["ties"][0]
    assert f"ties     {told['ties_note']}\n" in printed
    page = (here / "b" / "report.html").read_text(encoding="utf-8")
    assert html.escape(told["ties_note"]) in page


def test_a_sweep_has_the_code_of_a_run_whose_slo_is_not_met(here: Path) -> None:
    words = ["capacity", "-m", *SMALL, "parallel=local", "seeds=1", "precision=0.1", "slo.tbt_p99_ms=1,200"]
    assert main([*words, "hydra.sweep.dir=swept"]) == 3
    told = [loaded(here / "swept" / str(number) / "capacity.json") for number in (0, 1)]
    assert [bool(one["closest"]) for one in told] == [True, False]


def test_a_policy_that_meets_the_slo_at_no_rate_is_named_beside_one_that_does(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["capacity", *SMALL, "parallel=local", "scheduler=sarathi,orca_best", "seeds=1", "precision=0.1"]
    assert main([*words, "slo.ttft_p99_ms=200", "scheduler.chunk=32", "hydra.run.dir=a"]) == 0
    printed = capfd.readouterr().out
    told = loaded(here / "a" / "capacity.json")
    unmet = [row["policy"] for row in told["capacities"] if not any(row["by_seed"])]
    assert [one["setting"] for one in told["closest"]] == unmet == ["sarathi"]
    assert printed.count("meets the SLO at no rate: sarathi at ") == 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["tune", "parallel=tp8"], "parallel: searched by tune; use search.tp=[8] search.pp=[2] to fix it"),
        (["tune", "scheduler.chunk=512"], "scheduler.chunk: searched by tune; use search.chunk=[512] to fix it"),
        (["tune", "nodes=0"], "nodes=0: must be 1 to 65536"),
        (["tune", "search.chunk=[]"], "search.chunk=[]: must be a list of values of 1 or more"),
        (["tune", "search.chnk=[1]"], "search.chnk: unknown key; did you mean 'search.chunk'?"),
        (["tune", "scheduler=sarati"], "scheduler=sarati: unknown; did you mean 'sarathi'?"),
        (["tune", "workload.num_prompts=3"], "workload.num_prompts=3: must be at least 20 for a p99"),
        (
            ["tune", "search.tp=[3]", "search.pp=[1]"],
            "nodes=1: no tp x pp on 8 devices holds the model: 3 ranks per replica do not divide 8 devices",
        ),
        (
            ["capacity", "slo.ttft_p99_ms=null", "slo.tbt_p99_ms=null"],
            "slo: set slo.ttft_p99_ms, slo.tbt_p99_ms or both",
        ),
        (["capacity", "slo.ttft_ms=3"], "slo.ttft_ms: unknown key; did you mean 'slo.ttft_p99_ms'?"),
        (
            ["capacity", "workload.max_concurrency=3", "workload.request_rate=2"],
            "workload.request_rate=2.0: must be null in a closed loop (max_concurrency)",
        ),
        (
            ["tune", "workload.warmup_requests=3"],
            "workload.warmup_requests=3: must be 0; only a closed loop supports it",
        ),
        (["capacity", "max_seeds=2"], "max_seeds=2: must be null or 3 (seeds) to 60"),
        (["capacity", "seeds=0"], "seeds=0: must be 1 to 30"),
    ],
)
def test_each_error_is_one_line(arguments: list[str], line: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert capfd.readouterr() == ("", f"gapless: error: {line}\n")
    assert not list(here.iterdir())


def test_which_policies_are_tried() -> None:
    assert composed(TuneConfig, "tune").policies == (SarathiConfig(), TokenBudgetConfig(), EqualTimeConfig())
    assert composed(TuneConfig, "tune", "scheduler=orca_best").policies == ()
    assert composed(TuneConfig, "tune", "scheduler=orca_best").scheduler == OrcaBestConfig()
    every = composed(TuneConfig, "tune", "scheduler.order=deadline").policies
    assert [policy.order for policy in every] == ["deadline"] * 3
    points = compose.compose_all(["nodes=1,2"], TuneConfig, "tune", multirun=True)
    assert [(point.config.nodes, len(point.config.policies)) for point in points] == [(1, 3), (2, 3)]


def test_overrides_compose_to_the_config(tmp_path: Path) -> None:
    words = [
        "model=mistral-7b",
        "model.dtype=float16",
        "hardware=h200",
        "hardware.memory_gib=99.5",
        "parallel.pp=3",
        "parallel.tp=4",
        "parallel.layers=[10,11,11]",
        "scheduler=equal_time",
        "scheduler.chunk=auto",
        "workload.request_rate=1.2345678901234567",
        "workload.theta=0.3",
        "simulation.overlap_sends=false",
    ]
    config = composed(SimulateConfig, "simulate", *words)
    found = overrides(config, "simulate")
    assert composed(SimulateConfig, "simulate", *found) == config
    assert set(found) <= {*words, "parallel=tp4_pp3"}
    trace = tmp_path / "it's a trace.csv"
    config = composed(BenchConfig, "bench", "workload=trace", f"workload.path={trace}", "parallel=pp2")
    _, _, *again = shlex.split(command_line(config, "bench"))
    assert composed(BenchConfig, "bench", *again) == config


def test_a_model_of_experts_is_tuned_over_both_layouts(here: Path) -> None:
    """Skewed routes favour slices where a rank would have one expert."""
    requests = ["workload=fixed", "workload.num_prompts=100", "workload.input_len=2000", "workload.output_len=20"]
    chosen = ["model=mixtral-8x7b", "hardware=h100", *requests, "slo.ttft_p99_ms=2000", "scheduler=sarathi", "seeds=1"]
    grid = ["search.tp=[8]", "search.pp=[1]", "search.chunk=[2048]", "search.finalists=2", "precision=0.02"]
    assert main(["tune", *chosen, *grid, "simulation.expert_skew=1", "hydra.run.dir=out"]) == 0
    told = loaded(here / "out" / "tune.json")
    assert {one["setting"].partition(" sarathi")[0] for one in told["tried"]} == {"tp8 pp1", "tp8 ep pp1"}
    assert told["winner"]["setting"].startswith("tp8 pp1")
    assert list(told["commands"]) == ["simulates it at the first seed's rate", "runs it on the real devices"]
    words = shlex.split(told["commands"]["simulates it at the first seed's rate"])[2:]
    assert not composed(SimulateConfig, "simulate", *words).parallel.expert_parallel
    assert main(["tune", *chosen, *grid, "search.expert_parallel=[true]", "hydra.run.dir=whole"]) == 0
    whole = loaded(here / "whole" / "tune.json")
    assert {one["setting"].partition(" sarathi")[0] for one in whole["tried"]} == {"tp8 ep pp1"}
    assert "parallel.expert_parallel=true" in whole["commands"]["simulates it at the first seed's rate"]


def test_a_search_over_no_layout_of_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"search\.expert_parallel=\[\]: must be false, true or both"):
        SearchConfig(expert_parallel=())
