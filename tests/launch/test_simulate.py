"""`gapless simulate` in this process: what it writes, fleets, sweeps and their end, policies of one's own, errors."""

from __future__ import annotations

import csv
import html
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gapless.conf.build import build
from gapless.conf.policies import POLICY_CONFIGS, SarathiConfig
from gapless.conf.schema import SimulateConfig
from gapless.launch import compose
from gapless.launch.cli import main
from gapless.runtime.engine.plan import make_plan
from tests.support.hand_made import close_to

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "policies.md"
SMALL = [
    "model=llama-7b",
    "parallel=tp2_pp2",
    "workload=fixed",
    "workload.num_prompts=12",
    "workload.input_len=300",
    "workload.output_len=20",
]
FILES = {
    *("requests.csv", "spans.csv.gz", "record.jsonl.gz", "stage_times.json", "summary.json", "trace.json.gz"),
    "report.html",
}


def configs(*overrides: str, multirun: bool = False) -> list[SimulateConfig]:
    return [point.config for point in compose.compose_all(overrides, SimulateConfig, "simulate", multirun=multirun)]


def loaded(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (source,) = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    (tmp_path / "shortest_rest_first.py").write_text(source, encoding="utf-8")
    return tmp_path


def test_one_run_is_the_run_folder_and_the_same_again(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    chosen = [*SMALL, "simulation.jitter=0.1", "workload.request_rate=20"]
    for name, more in (("a", []), ("b", []), ("c", ["seed=1"])):
        assert main(["simulate", *chosen, *more, f"hydra.run.dir={name}"]) == 0
    assert {path.name for path in (here / "a").iterdir()} == {*FILES, ".hydra"}
    rows = [(here / name / "requests.csv").read_text(encoding="utf-8") for name in "abc"]
    assert rows[0] == rows[1] != rows[2]
    summary = loaded(here / "a" / "summary.json")
    assert (summary["completed"], summary["total_output_tokens"]) == (12, 240)
    printed = capfd.readouterr()
    assert "12 requests in" in printed.out
    assert "stage 1" in printed.out
    assert "12/12 requests" in printed.err
    error = summary["cost_error"]
    said = f"tage times may be off by {error['low']:+.0%} to {error['high']:+.0%} ({error['source']})"
    assert printed.out.replace("\n", " ").count(f"s{said}") == 3  # once a run
    assert f"S{html.escape(said)}." in (here / "a" / "report.html").read_text(encoding="utf-8")


def test_without_a_record_the_summary_is_the_same(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name, record in (("kept", "true"), ("counted", "false")):
        assert main(["simulate", *SMALL, f"simulation.record={record}", f"hydra.run.dir={name}"]) == 0
    kept, counted = (loaded(here / name / "summary.json") for name in ("kept", "counted"))
    assert kept.pop("stragglers") == []
    assert kept.pop("causes") == []
    assert "stragglers" not in counted
    assert counted.pop("compute") == close_to(kept.pop("compute"))
    for key, value in kept.items():
        if key not in ("title", "date", "config", "prediction_error") and not key.endswith("_itl_ms"):
            assert counted[key] == (value if value is None else pytest.approx(value)), key
    assert {path.name for path in (here / "counted").iterdir()} == {"summary.json", ".hydra"}
    assert "TTFT" in capfd.readouterr().out


def test_faults_are_shown_and_cost_time(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    faults = ["simulation.faults.at=[0.2,3.6]", "seed=5"]
    for name, more in {"calm": [], "a": faults, "b": faults, "spare": [*faults, "parallel.spares=1"]}.items():
        assert main(["simulate", *SMALL, "workload.output_len=100", *more, f"hydra.run.dir={name}"]) == 0
    calm, first, again, spare = (loaded(here / name / "summary.json") for name in ("calm", "a", "b", "spare"))
    assert calm["faults"] == []
    assert {key: first[key] for key in first.keys() - {"date"}} == {key: again[key] for key in again.keys() - {"date"}}
    for summary, start in ((first, 2.9), (spare, 0.1)):
        assert (summary["completed"], summary["total_output_tokens"]) == (12, 1200)
        assert summary["faults"][0]["time"] == pytest.approx(0.2)
        assert summary["faults"][0]["parts"] == pytest.approx(
            {"detect": 0.03, "stop": 0.02, "start": start, "rendezvous": 0.1, "weights": 0.2}
        )
        assert summary["duration"] > calm["duration"] + summary["recovery_seconds"]
    assert len(first["faults"]) == 2
    assert "<h2>Faults</h2>" in (here / "a" / "report.html").read_text(encoding="utf-8")
    out = capfd.readouterr().out
    assert "fault at 0.20 s (process): rank" in out
    assert "recovery" in out
    assert main(["simulate", *SMALL, *faults, "parallel.max_recoveries=0"]) == 1
    assert "fault 1 within 600 s (parallel.max_recoveries=0)" in capfd.readouterr().err


def test_replicas_beside_a_pipeline_as_in_figure_12(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *SMALL, "parallel=tp2", "simulation.replicas=2", "hydra.run.dir=fleet"]) == 0
    assert main(["simulate", *SMALL, "hydra.run.dir=pipeline"]) == 0
    assert {path.name for path in (here / "fleet").iterdir()} == {
        "replica_0",
        "replica_1",
        "summary.json",
        "requests.csv",
        "report.html",
        ".hydra",
    }
    assert {path.name for path in (here / "fleet" / "replica_1").iterdir()} == FILES
    assert "replica 1" in capfd.readouterr().out
    errors = [loaded(here / name / "summary.json")["cost_error"] for name in ("fleet", "fleet/replica_1", "pipeline")]
    assert errors[0] == errors[1] == errors[2]
    assert main(["report", "fleet", "pipeline", "figures=false", "slo.ttft_ms=10000", "out=both"]) == 0
    printed = capfd.readouterr().out
    assert "2 settings" in printed
    rows = loaded(here / "both" / "comparison.json")["candidates"]
    assert [row["metrics"]["completed"]["median"] for row in rows] == [12, 12]
    assert [row["settings"]["simulation.replicas"] for row in rows] == [2, 1]
    assert all(row["metrics"]["request_goodput"]["median"] > 0 for row in rows)
    assert main(["report", "fleet", "figures=false"]) == 0
    printed = capfd.readouterr().out
    assert "replica 1" in printed
    assert "Stage times may be off by" in printed
    assert main(["report", "fleet/replica_1", "figures=false"]) == 0
    assert "6 requests in" in capfd.readouterr().out


POOLS = [*SMALL, "parallel=tp2", "workload.request_rate=20", "simulation.disaggregation.prefill_replicas=1"]


def test_pools_beside_replicas_that_do_both(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    chosen = [*POOLS, "simulation.replicas=2", "simulation.disaggregation.prefill_pp=2"]
    assert main(["simulate", *chosen, "hydra.run.dir=pools"]) == 0
    printed = capfd.readouterr().out
    assert "on 8 x a100-80g, 1 prefill of tp 2, pp 2, 2 decode of tp 2, pp 1" in printed
    assert "KV transfer" in printed
    summary = loaded(here / "pools" / "summary.json")
    assert (summary["completed"], summary["total_input_tokens"], summary["total_output_tokens"]) == (12, 3600, 240)
    assert (summary["replicas"], summary["prefill_replicas"], summary["requests_per_replica"]) == (3, 1, [12, 6, 6])
    with (here / "pools" / "requests.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["replica"], row["decode_replica"]) for row in rows] == [("0", str(1 + n % 2)) for n in range(12)]
    assert [row["output_tokens"] for row in rows] == ["20"] * 12
    sent = [float(row["kv_transfer_ms"]) for row in rows]
    assert summary["mean_kv_transfer_ms"] == pytest.approx(sum(sent) / 12, abs=1e-3)
    bytes_a_flow = 300 * 2 * 32 * 4096 * 2 / 2  # of LLaMA 7B in bfloat16, from each of two ranks
    assert 1e-3 * min(sent) > bytes_a_flow / 25e9, "an adapter has 200 Gbit/s"
    assert main(["report", "pools", "figures=false"]) == 0
    again = capfd.readouterr().out
    assert [row for row in again.splitlines() if "KV" in row] == [row for row in printed.splitlines() if "KV" in row]
    page = (here / "pools" / "report.html").read_text(encoding="utf-8")
    assert "prefill 0" in page
    assert "decode 2" in page
    assert "p50 and p99 of whole requests" in page
    assert main(["simulate", *SMALL, "simulation.replicas=2", "parallel=tp2_pp2", "hydra.run.dir=both"]) == 0
    assert main(["report", "both", "pools", "figures=false", "out=compared"]) == 0
    assert "KV transfer, p99" in capfd.readouterr().out
    found = loaded(here / "compared" / "comparison.json")["candidates"]
    assert [row["metrics"]["completed"]["median"] for row in found] == [12, 12]


def test_a_prefill_pool_has_a_prefix_cache(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = [
        json.dumps({"timestamp": 200 * n, "input_length": 1280, "output_length": 10, "hash_ids": [1, 2, 100 + n]})
        for n in range(6)
    ]
    (here / "trace.jsonl").write_text("\n".join(lines), encoding="utf-8")
    pools = ["simulation.replicas=2", "simulation.disaggregation.prefill_replicas=1"]
    trace = ["workload=trace", "workload.path=trace.jsonl", "hydra.run.dir=out"]
    assert main(["simulate", "model=llama-7b", "parallel=tp2", "workload.num_prompts=6", *trace, *pools]) == 0
    summary = loaded(here / "out" / "summary.json")
    assert (summary["completed"], summary["cached_input_tokens"]) == (6, 5 * 1024)


def test_policies_are_compared_over_pools(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *POOLS, "scheduler=sarathi,equal_time", "hydra.run.dir=out"]) == 0
    runs = loaded(here / "out" / "simulate.json")["runs"]
    assert [(run["policy"], run["completed"]) for run in runs] == [("sarathi", 12), ("equal_time", 12)]
    assert "prefill 0 of 2" in (here / "out" / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (["simulation.record=false"], "simulation.record"),
        (["simulation.faults.at=[1]"], "simulation.faults"),
        (["simulation.devices=[a100-80g]"], "simulation.devices"),
        (["scheduler=orca_worst"], "scheduler='orca_worst'"),
        (["simulation.disaggregation.prefill_tp=3"], "in the prefill pool (simulation.disaggregation): "),
        (["simulation.disaggregation.prefill_hardware=a100-80"], "simulation.disaggregation.prefill_hardware"),
        (
            ["simulation.disaggregation.prefill_replicas=null", "simulation.disaggregation.prefill_tp=2"],
            "simulation.disaggregation.prefill_tp: needs a prefill pool",
        ),
    ],
)
def test_what_does_not_go_with_pools_is_told(
    here: Path, capfd: pytest.CaptureFixture[str], keys: list[str], told: str
) -> None:
    assert main(["simulate", *POOLS, *keys]) == 2
    errors = capfd.readouterr().err.strip().splitlines()
    assert len(errors) == 1
    assert told in errors[0]


def test_a_search_has_no_pools(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["capacity", "slo.tbt_p99_ms=50", "simulation.disaggregation.prefill_replicas=1"]) == 2
    assert "simulation.disaggregation.prefill_replicas=1: must be null" in capfd.readouterr().err


def test_several_policies_and_repeats_leave_their_comparison(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    chosen = ["scheduler=sarathi,./shortest_rest_first.py", "scheduler.chunk=64", "repeats=2", "hydra.run.dir=out"]
    assert main(["simulate", *SMALL, *chosen, "simulation.jitter=0.2"]) == 0
    told = loaded(here / "out" / "simulate.json")
    assert [run["policy"] for run in told["runs"]] == ["sarathi"] * 2 + ["shortest_rest_first.py"] * 2
    spans = [run["duration"] for run in told["runs"]]
    assert len(set(spans)) == 4, "repeats differ by their seed"
    folder = here / "out" / told["runs"][3]["folder"]
    config = build(SimulateConfig, yaml.safe_load((folder / ".hydra" / "config.yaml").read_text(encoding="utf-8")))
    assert config.scheduler.name == "shortest_rest_first.py"
    assert config.scheduler.chunk == 64  # type: ignore[attr-defined]
    printed = capfd.readouterr().out
    assert "shortest_rest_first.py" in printed
    assert "2 settings, 4 runs" in printed


@pytest.mark.slow
def test_a_sweep_ends_with_one_table_and_one_comparison(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    chosen = ["scheduler=orca_best,./shortest_rest_first.py", "scheduler.chunk=64,128"]
    assert main(["simulate", "-m", *SMALL, *chosen, "hydra.sweep.dir=swept"]) == 0
    printed = capfd.readouterr()
    assert "run 1 equals run 0 without scheduler.chunk: skipped" in printed.err
    assert "scheduler=shortest_rest_first.py" in printed.err
    assert "3 settings" in printed.out
    assert printed.out.replace("\n", " ").count("tage times may be off by ") == 1  # of all of them
    assert printed.out.rstrip().endswith("swept/report.html")
    assert "to compare these runs" not in printed.err
    found = loaded(here / "swept" / "comparison.json")
    assert {row["label"] for row in found["candidates"]} == {
        "orca_best",
        "shortest_rest_first.py chunk=64",
        "shortest_rest_first.py chunk=128",
    }
    figures = {path.name for path in (here / "swept" / "figures").iterdir()}
    assert figures >= {"throughput_against_tbt.png", "throughput_against_ttft.png"}


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("hydra_plugins") is None
    or importlib.util.find_spec("hydra_plugins.hydra_joblib_launcher") is None,
    reason="needs hydra-joblib-launcher",
)
def test_a_sweep_over_processes(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    chosen = ["scheduler=sarathi,./shortest_rest_first.py", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    assert main(["simulate", "-m", *SMALL, *chosen, "hydra.sweep.dir=swept"]) == 0
    assert [row["label"] for row in loaded(here / "swept" / "comparison.json")["candidates"]] == [
        "sarathi",
        "shortest_rest_first.py",
    ]
    assert "2 settings" in capfd.readouterr().out
    source = (here / "shortest_rest_first.py").read_text(encoding="utf-8")
    broken = source.replace("while self.admit():", "while self.admit(mine=True):")
    (here / "broken.py").write_text(broken, encoding="utf-8")
    assert main(["simulate", "-m", *SMALL, "scheduler=./broken.py,sarathi", *chosen[1:], "hydra.sweep.dir=two"]) == 2
    assert re.search(r"broken\.py:\d+: in .*: TypeError: ", capfd.readouterr().err)
    assert (here / "two" / "1" / "summary.json").is_file(), "the others run on"


def test_files_among_policies(here: Path) -> None:
    (config,) = configs("scheduler=./shortest_rest_first.py,sarathi", "scheduler.chunk=8", "scheduler.tile=4")
    assert [policy.name for policy in config.policies] == ["shortest_rest_first.py", "sarathi"]
    assert config.policies[0].file == str(here / "shortest_rest_first.py")  # type: ignore[attr-defined]
    assert config.policies[1] == SarathiConfig(chunk=8, tile=4)
    assert config.scheduler == config.policies[0]
    (here / "sarathi.py").write_text((here / "shortest_rest_first.py").read_text(encoding="utf-8"), encoding="utf-8")
    swept = configs("scheduler=sarathi,./sarathi.py", "scheduler.tile=2", multirun=True)
    assert [policy.scheduler.name for policy in swept] == ["sarathi", "sarathi.py"]
    (here / "my own").mkdir()
    (here / "sarathi.py").rename(here / "my own" / "my sarathi (1).py")
    (config,) = configs("scheduler=my own/my sarathi (1).py")
    assert config.scheduler.file == str(here / "my own" / "my sarathi (1).py")  # type: ignore[attr-defined]


def test_the_smallest_of_mixed_devices_bounds_the_cache(here: Path) -> None:
    def blocks(*devices: str) -> int:
        chosen = ["model=llama-33b", "parallel=tp2_pp2"]
        (config,) = configs(*chosen, f"simulation.devices=[{','.join(devices)}]")
        return make_plan(config).num_blocks

    large, mixed, small = blocks("a100-80g", "a100-80g"), blocks("a100-80g", "a6000"), blocks("a6000", "a6000")
    assert small <= mixed < large
    assert blocks("a6000", "a100-80g") < large


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["scheduler=./nothing.py"], "scheduler=./nothing.py: no such file"),
        (["scheduler=sarathi,./nothing.py"], "scheduler=./nothing.py: no such file"),
        (
            ["scheduler=./shortest_rest_first.py", "scheduler.chnk=3"],
            "scheduler.chnk: unknown key; did you mean 'scheduler.chunk'?",
        ),
        (["scheduler=./shortest_rest_first.py", "scheduler.chunk=x"], "scheduler.chunk='x': must be an integer"),
        (
            ["scheduler=./shortest_rest_first.py,orca_best", "scheduler.tile=3"],
            "scheduler.tile: unknown key of shortest_rest_first.py, orca_best; sarathi, equal_time have it",
        ),
        (["scheduler=./broken.py"], "{here}/broken.py:1: SyntaxError: invalid syntax"),
        (["scheduler=./empty.py"], "{here}/empty.py: must hold one class that extends Scheduler; it holds none"),
        (["simulation.devices=[a100-80g,a100]"], "simulation.devices=a100: unknown; did you mean '"),
        (["simulation.replicas=0"], "simulation.replicas=0: must be 1 to 10000"),
        (
            ["simulation.router=nearest"],
            "simulation.router='nearest': must be round_robin, least_requests or least_tokens",
        ),
        (
            ["simulation.faults.mtbf_s=60"],
            "simulation.faults.mtbf_s: unknown key; did you mean 'simulation.faults.rank_mtbf_s'?",
        ),
        (["simulation.faults.rank_mtbf_s=0"], "simulation.faults.rank_mtbf_s=0.0: must be null or above 0"),
        (["simulation.faults.at=[3,-1]"], "simulation.faults.at=[3.0, -1.0]: must be null or seconds of 0 or more"),
        (
            ["simulation.faults.at=[3]", "simulation.faults.rank_mtbf_s=60"],
            "simulation.faults.at=[3.0]: must be null if simulation.faults.rank_mtbf_s is set",
        ),
        (["simulation.faults.hang_share=2"], "simulation.faults.hang_share=2.0: must be 0 to 1"),
        (["simulation.faults.stop_s=-1"], "simulation.faults.stop_s=-1.0: must be 0 or more"),
        (["model=gpt3-175b"], "hardware.memory_gib="),
    ],
)
def test_errors_are_one_line(arguments: list[str], line: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "broken.py").write_text("def\n", encoding="utf-8")
    (here / "empty.py").write_text("", encoding="utf-8")
    before = set(here.iterdir())
    assert main(["simulate", *SMALL, *arguments]) == 2
    out, error = capfd.readouterr()
    assert out == ""
    assert error.startswith(f"gapless: error: {line.format(here=here)}")
    assert error.count("\n") == 1
    assert {path for path in here.iterdir() if path.name != "__pycache__"} == before


MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
    "sliding_window": None,
}


def test_a_folder_of_experts_is_simulated_but_not_profiled(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "mixtral").mkdir()
    (here / "mixtral" / "config.json").write_text(json.dumps(MIXTRAL), encoding="utf-8")
    seconds = {}
    for name, more in (
        ("sliced", []),
        ("whole", ["parallel.expert_parallel=true"]),
        ("skewed", ["parallel.expert_parallel=true", "simulation.expert_skew=1"]),
    ):
        chosen = ["model=./mixtral", "model.tokenizer=none", "parallel=tp2_pp2", "scheduler=equal_time", *SMALL[2:]]
        assert main(["simulate", *chosen, *more, f"hydra.run.dir={name}"]) == 0
        summary = loaded(here / name / "summary.json")
        assert summary["completed"] == 12
        seconds[name] = summary["duration"]
    assert seconds["skewed"] != seconds["whole"] != seconds["sliced"]
    capfd.readouterr()
    assert main(["profile", "model=mixtral-8x7b", "parallel=local", "hardware.memory_gib=400"]) == 2
    assert capfd.readouterr().err.strip() == (
        "gapless: error: model=mixtral-8x7b: gapless profile supports neither experts nor MLA yet"
    )


@pytest.mark.parametrize("policy", sorted(POLICY_CONFIGS))
def test_every_policy_serves_a_model_of_experts(policy: str, here: Path) -> None:
    chosen = ["model=qwen3-30b-a3b", "hardware=h100", f"scheduler={policy}", *SMALL[1:], "simulation.record=false"]
    assert main(["simulate", *chosen, "hydra.run.dir=run"]) == 0
    assert loaded(here / "run" / "summary.json")["completed"] == 12


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("model.architecture.experts.experts_per_token=9", "must be 1 to num_experts=8"),
        ("model.architecture.experts.num_experts=0", "must be 1 to 65536"),
        ("model.architecture.experts.shared_ffn_size=-1", "must be 0 to 2147483647"),
        ("simulation.expert_skew=-1", "must be 0 to 10"),
    ],
)
def test_experts_out_of_range_are_one_line(key: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "model=mixtral-8x7b", key]) == 2
    printed = capfd.readouterr().err.strip()
    assert printed.count("\n") == 0
    assert key.partition("=")[0] in printed
    assert said in printed
