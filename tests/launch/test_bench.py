"""`gapless bench` in this process: what a command line becomes, what runs in which order, and what it leaves."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from gapless import LLM
from gapless.conf.build import build
from gapless.conf.errors import ConfigError
from gapless.conf.policies import EqualTimeConfig, OrcaBestConfig, SarathiConfig, SchedulerConfig
from gapless.conf.schema import BenchConfig, EngineConfig, ModelConfig, ReportConfig
from gapless.conf.workloads import FixedConfig, SloConfig, ZipfConfig
from gapless.launch import compose
from gapless.launch.cli import main
from gapless.launch.ray_launcher import RayLauncher
from gapless.launch.turns import labels, make_plans, turns
from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.core.messages import MicroBatchResult
from gapless.runtime.core.work_item import WorkItem
from gapless.runtime.pipeline.local import LocalPipeline
from gapless.runtime.pipeline.protocol import PipelineError
from tests.support.hf_models import make_model

SMALL = ["model=tiny", "cache.num_blocks=300", "parallel.threads=1"]
FEW = ["workload.num_prompts=5", "workload.input_len=40", "workload.output_len=4"]
FILES = {"requests.csv", "spans.csv.gz", "record.jsonl.gz", "summary.json", "trace.json.gz", "report.html"}


def configs(*overrides: str, multirun: bool = False) -> list[BenchConfig]:
    return [point.config for point in compose.compose_all(overrides, BenchConfig, "bench", multirun=multirun)]


def one(*overrides: str) -> BenchConfig:
    (config,) = configs(*overrides)
    return config


def loaded(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_a_plan_has_to_say_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = make_model("phi3", tmp_path).config.to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    words = (f"model={tmp_path}", "model.tokenizer=none", "scheduler=sarathi,token_budget")
    assert len(make_plans(one(*words))) == 2
    assert caplog.text.count(" longrope: ") == 1


@pytest.mark.parametrize(
    ("overrides", "policies"),
    [
        ([], ()),
        (["scheduler=orca_best"], ()),
        (["scheduler=orca_best,sarathi"], (OrcaBestConfig(), SarathiConfig())),
        (["scheduler=choice(sarathi,orca_best)"], (SarathiConfig(), OrcaBestConfig())),
        (
            ["scheduler=orca_best,sarathi,equal_time", "scheduler.chunk=64", "scheduler.batch=3"],
            (OrcaBestConfig(batch=3), SarathiConfig(batch=3, chunk=64), EqualTimeConfig(batch=3, chunk=64)),
        ),
        (
            ["scheduler=sarathi,equal_time", "scheduler.chunk=auto", "scheduler.target_ms=50"],
            (SarathiConfig(chunk="auto"), EqualTimeConfig(chunk="auto", target_ms=50.0)),
        ),
        (
            ["scheduler=sarathi,orca_best", "++scheduler.order=deadline"],
            (SarathiConfig(order="deadline"), OrcaBestConfig(order="deadline")),
        ),
        (
            ["policies=[{name:sarathi,chunk:8},{name:sarathi,chunk:16}]"],
            (SarathiConfig(chunk=8), SarathiConfig(chunk=16)),
        ),
    ],
)
def test_several_policies_are_one_config(overrides: list[str], policies: tuple[SchedulerConfig, ...]) -> None:
    config = one(*overrides)
    assert config.policies == policies
    if policies and "scheduler" in overrides[0]:
        assert config.scheduler == policies[0]


def test_keys_of_swept_groups_apply_where_they_exist() -> None:
    swept = configs(
        "scheduler=orca_best,sarathi",
        "scheduler.chunk=8,16",
        "workload=fixed,zipf",
        "workload.theta=1.0",
        "workload.max_len=2048",
        multirun=True,
    )
    points = Counter((config.scheduler, type(config.workload).__name__) for config in swept)
    assert points == {
        (policy, workload): 2 if policy == OrcaBestConfig() else 1
        for policy in (OrcaBestConfig(), SarathiConfig(chunk=8), SarathiConfig(chunk=16))
        for workload in ("FixedConfig", "ZipfConfig")
    }
    assert {config.workload for config in swept} == {FixedConfig(), ZipfConfig(theta=1.0, max_len=2048)}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["scheduler=orca_best,sarati"], "scheduler=sarati: unknown; did you mean 'sarathi'?"),
        (
            ["scheduler=orca_best,sarathi", "scheduler.max_batched_tokens=8"],
            "scheduler.max_batched_tokens: unknown key of orca_best, sarathi; token_budget has it",
        ),
        (
            ["scheduler=orca_best,sarathi", "scheduler.chnk=8"],
            "scheduler.chnk: unknown key; did you mean 'scheduler.chunk'?",
        ),
        (["scheduler=orca_best,sarathi", "scheduler.chunk=0"], "scheduler.chunk=0: must be auto or 1 or more"),
        (
            ["scheduler=orca_best,sarathi", "scheduler.chunk=8,16"],
            "scheduler.chunk=8,16: comma-separated values are a sweep; add -m to run each",
        ),
        (
            ["scheduler=orca_best,sarathi", "scheduler.name=sarathi"],
            "scheduler.name: cannot be set; choose policies by scheduler=NAME,NAME",
        ),
        (
            ["scheduler=sarathi,sarathi"],
            "scheduler=sarathi,sarathi: sarathi is repeated; repeats=2 runs each policy twice",
        ),
        (["scheduler=orca_best,sarathi", "policies=[]"], "scheduler and policies are both given; give one of them"),
        (
            ["-m", "scheduler=orca_best,request_level", "scheduler.chunk=8,16"],
            "scheduler.chunk: unknown key of orca_best, request_level; sarathi, equal_time have it",
        ),
        (
            ["-m", "workload=fixed,zipf", "workload.path=x"],
            "workload.path: unknown key of fixed, zipf; trace, sharegpt have it",
        ),
        (["workload=zipff"], "workload=zipff: unknown; did you mean 'zipf'?"),
        (["workload.theta=1"], "workload.theta: unknown key of workload fixed; zipf has it"),
        (["workload=trace"], "workload.path='': must be the trace file"),
        (["workload=trace", "workload.path=a,b.csv"], "workload.path=a,b.csv: no such file"),
        (
            ["workload=sharegpt", "workload.path=bad.json"],
            "bad.json: not ShareGPT's JSON, a list of {conversations: [{value: ...}]} (Input data was truncated)",
        ),
        (["workload=trace", "workload.path=bad.csv"], "bad.csv:3: not a time and two token counts: '1,2'"),
        (
            ["workload.input_len=2000"],
            "workload=fixed: requests have up to 2128 tokens, but a request may have 2048 "
            "(model.max_model_len or KV-cache capacity); workload.input_len=1920 fits",
        ),
        (
            ["workload=zipf"],
            "workload.max_len=4096: some requests have this length, but a request may have 2048 (model.max_model_len "
            "or KV-cache capacity); workload.max_len=2048 fits",
        ),
        (
            ["cache.num_blocks=16"],
            "workload=fixed: requests have up to 1152 tokens, but a request may have 256 "
            "(model.max_model_len or KV-cache capacity); workload.input_len=128 fits",
        ),
        (["repeats=0"], "repeats=0: must be 1 to 10000"),
        (["slo.ttft=3"], "slo.ttft: unknown key; did you mean 'slo.ttft_ms'?"),
        (["prompts=x"], "prompts: unknown key; did you mean 'repeats'?"),
    ],
)
def test_each_error_is_one_line_and_starts_nothing(
    arguments: list[str], line: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "bad.json").write_text("[", encoding="utf-8")
    (here / "bad.csv").write_text("Timestamp,Request tokens,Response tokens\n0,1,1\n1,2\n", encoding="utf-8")
    assert main(["bench", *arguments]) == 2
    assert capfd.readouterr() == ("", f"gapless: error: {line}\n")
    assert {path.name for path in here.iterdir()} == {"bad.json", "bad.csv"}


def test_order_of_runs() -> None:
    def order(**keys: Any) -> list[tuple[str, int, str]]:
        config = BenchConfig(model=ModelConfig(weights="shipped"), **keys)
        return [(turn.label, turn.repeat, turn.folder) for turn in turns(config, interleave=config.interleave)]

    two = (OrcaBestConfig(), SarathiConfig())
    assert order() == [("equal_time", 1, "")]
    assert order(policies=two, repeats=2) == [
        ("orca_best", 1, "01_orca_best"),
        ("sarathi", 1, "02_sarathi"),
        ("orca_best", 2, "03_orca_best"),
        ("sarathi", 2, "04_sarathi"),
    ]
    assert [each[:2] for each in order(policies=two, repeats=2, interleave=False)] == [
        ("orca_best", 1),
        ("orca_best", 2),
        ("sarathi", 1),
        ("sarathi", 2),
    ]
    assert [folder for *_, folder in order(repeats=100)][::99] == ["001_equal_time", "100_equal_time"]


def test_labels_say_what_differs() -> None:
    assert labels([OrcaBestConfig(), SarathiConfig()]) == ["orca_best", "sarathi"]
    assert labels([SarathiConfig(chunk=8), OrcaBestConfig(batch=2), SarathiConfig(tile=4)]) == [
        "sarathi chunk=8 tile=null",
        "orca_best",
        "sarathi chunk=256 tile=4",
    ]
    assert len(set(labels([SarathiConfig()] * 3))) == 3


def test_two_policies_leave_whole_folders_and_their_comparison(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    chosen = ["scheduler=orca_best,sarathi", "scheduler.chunk=16", "repeats=2", "workload.request_rate=inf"]
    assert main(["bench", *SMALL, *FEW, *chosen, "slo.e2el_ms=60000", "hydra.run.dir=out"]) == 0
    printed = capfd.readouterr()
    names = ["01_orca_best", "02_sarathi", "03_orca_best", "04_sarathi"]
    out = here / "out"
    assert {path.name for path in out.iterdir()} > {*names, ".hydra", "bench.json", "report.html", "comparison.json"}
    bench = loaded(out / "bench.json")
    assert [(run["folder"], run["policy"], run["repeat"]) for run in bench["runs"]] == [
        (names[0], "orca_best", 1),
        (names[1], "sarathi", 1),
        (names[2], "orca_best", 2),
        (names[3], "sarathi", 2),
    ]
    assert bench["requests"] == 5
    for run in bench["runs"]:
        folder = out / run["folder"]
        assert {path.name for path in folder.iterdir()} >= FILES
        summary = loaded(folder / "summary.json")
        assert {key: run[key] for key in summary if key not in ("config", "versions")} == {
            key: value for key, value in summary.items() if key not in ("config", "versions")
        }
        assert (run["completed"], run["total_input_tokens"], run["total_output_tokens"]) == (5, 200, 20)
        assert run["request_goodput"] == run["request_throughput"]
        config = build(BenchConfig, yaml.safe_load((folder / ".hydra" / "config.yaml").read_text(encoding="utf-8")))
        assert config.scheduler == (OrcaBestConfig() if run["policy"] == "orca_best" else SarathiConfig(chunk=16))
        assert turns(config, interleave=True)[0].folder == "", "its config runs it alone"
    for policy in ("orca_best", "sarathi"):
        values = [run["output_throughput"] for run in bench["runs"] if run["policy"] == policy]
        told = bench["policies"][policy]["output_throughput"]
        assert (told["min"], told["median"], told["max"]) == pytest.approx((min(values), sum(values) / 2, max(values)))
        assert policy in printed.out
    base, other = (bench["policies"][policy]["output_throughput"] for policy in ("orca_best", "sarathi"))
    assert other["ratio"] == pytest.approx(other["median"] / base["median"])
    whole = build(BenchConfig, yaml.safe_load((out / ".hydra" / "config.yaml").read_text(encoding="utf-8")))
    assert whole.policies == (OrcaBestConfig(), SarathiConfig(chunk=16))
    assert "4/4 sarathi: 5/5 requests, 20 tokens" in printed.err
    assert "out/report.html" in printed.out


def test_one_run_is_the_run_folder_and_its_warmup_does_not_count(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trace = here / "t.csv"
    trace.write_text("Timestamp,Request tokens,Response tokens\n0,30,4\n0.05,4000,3\n", encoding="utf-8")
    chosen = ["workload=trace", "workload.path=t.csv", "slo.ttft_ms=60000", "hydra.run.dir=out"]
    assert main(["bench", *SMALL, *chosen]) == 0
    printed = capfd.readouterr()
    assert {path.name for path in (here / "out").iterdir()} == {*FILES, "stage_times.json", ".hydra"}
    summary = loaded(here / "out" / "summary.json")
    assert (summary["completed"], summary["total_input_tokens"], summary["total_output_tokens"]) == (2, 2075, 7)
    assert "truncated to the context length of 2048 tokens: 1 of 2 requests" in printed.err
    goodput = f"goodput: {summary['request_goodput']:.2f} requests/s within ttft_ms=60000"
    for shown in ("TTFT", "control", "out/report.html", goodput):
        assert shown in printed.out


def test_a_run_that_fails_leaves_what_came_before(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    waits = 0
    wait = LocalPipeline.wait

    def failing(self: LocalPipeline, deadline: float) -> list[MicroBatchResult]:
        nonlocal waits
        waits += 1
        if waits > 30:
            raise PipelineError("a stage burnt down")
        return wait(self, deadline)

    monkeypatch.setattr(LocalPipeline, "wait", failing)
    chosen = ["scheduler=orca_best,sarathi", "scheduler.chunk=8", "warmup=false", "hydra.run.dir=out"]
    assert main(["bench", *SMALL, *FEW, *chosen]) == 1
    errors = capfd.readouterr().err
    assert errors.endswith("gapless: error: a stage burnt down\n")
    assert "report up to the failure: out/02_sarathi/report.html" in errors
    assert "finished runs: 1; gapless report out" in errors
    assert loaded(here / "out" / "01_orca_best" / "summary.json")["completed"] == 5
    assert loaded(here / "out" / "02_sarathi" / "summary.json")["completed"] < 5


@pytest.mark.slow
def test_a_sweep_drops_what_a_policy_lacks(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    chosen = ["scheduler=orca_best,sarathi", "scheduler.chunk=8,16", "warmup=false", "hydra.sweep.dir=out"]
    assert main(["bench", "-m", *SMALL, *FEW, *chosen]) == 0
    printed, errors = capfd.readouterr()
    assert {path.name for path in (here / "out").iterdir()} == {
        "multirun.yaml",
        "0",
        "2",
        "3",
        "comparison.json",
        "comparison.csv",
        "report.html",
        "figures",
    }
    found = {}
    for name in "023":
        assert {path.name for path in (here / "out" / name).iterdir()} == {*FILES, ".hydra"}
        text = (here / "out" / name / ".hydra" / "config.yaml").read_text(encoding="utf-8")
        found[name] = build(BenchConfig, yaml.safe_load(text)).scheduler
    assert found == {"0": OrcaBestConfig(), "2": SarathiConfig(chunk=8), "3": SarathiConfig(chunk=16)}
    assert "gapless: run 1 equals run 0 without scheduler.chunk: skipped\n" in errors
    assert "3 settings" in printed
    assert printed.endswith("report   out/report.html\n")


@pytest.mark.slow
def test_one_pipeline_serves_policies_of_different_depth(ray_launcher: RayLauncher) -> None:
    config = build(
        EngineConfig,
        {
            "model": {"weights": "shipped"},
            "cache": {"num_blocks": 300},
            "parallel": {"pp": 2, "launcher": "ray", "threads": 1},
        },
    )
    items = [WorkItem([5 + n] * 40, 6, 0.01 * n) for n in range(6)]
    with LLM.from_config(config, launcher=ray_launcher, policies=[EqualTimeConfig()]) as llm:
        for policy, depth in ((SarathiConfig(chunk=16), 2), (EqualTimeConfig(chunk=16), 3), (OrcaBestConfig(), 2)):
            llm.reset(policy)
            assert llm.plan.limits.depth.most == depth
            assert sum(len(events) for events in llm.replay(items)) == 36
            Ledger(llm.record).check()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["a", "b/c"], ReportConfig(runs=("a", "b/c"))),
        (
            ["a", "sort=p99_itl_ms", "out=x y", "figures=false", "slo.ttft_ms=20"],
            ReportConfig(runs=("a",), sort="p99_itl_ms", out="x y", figures=False, slo=SloConfig(ttft_ms=20.0)),
        ),
        (["odd=name", "out=null"], ReportConfig(runs=("odd=name",))),
        (["a", "out=5"], ReportConfig(runs=("a",), out="5")),
    ],
)
def test_words_and_keys_of_report(arguments: list[str], expected: ReportConfig, here: Path) -> None:
    (here / "odd=name").mkdir()
    assert compose.from_arguments(arguments, ReportConfig, "runs") == expected


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["srt=x"], "srt: unknown key; did you mean 'sort'?"),
        (["figures=maybe"], "figures='maybe': must be true or false"),
        (["figures=["], "figures=[: not valid YAML"),
        (["-m", "a"], "-m: not an option of report; valid: --help, --version"),
    ],
)
def test_errors_of_report(arguments: list[str], line: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *arguments]) == 2
    assert capfd.readouterr() == ("", f"gapless: error: {line}\n")


def test_a_workload_s_path_survives_hydra() -> None:
    with pytest.raises(ConfigError, match=r"^workload.path='': must be the trace file"):
        one("workload=trace", "workload.path=")
    assert one("workload=trace", "workload.path=it's (1), [x]={y}.csv").workload.path == "it's (1), [x]={y}.csv"  # type: ignore[attr-defined]
