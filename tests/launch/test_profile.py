"""`gapless profile`: real ranks measure, a second run goes on, the result simulates, and mistakes are told."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from gapless.conf.errors import ConfigError
from gapless.conf.profiling import ProfileConfig
from gapless.launch import compose, profile
from gapless.launch.cli import main
from gapless.launch.ray_launcher import RayLauncher
from gapless.parallel.placement import StageLink
from gapless.runtime.simulation.cost.measured import read_measured
from gapless.runtime.simulation.cost.profile_folder import OPERATORS, OperatorSample, ProfileFolder
from gapless.runtime.simulation.cost.profile_point import Point
from gapless.runtime.simulation.profiling.profile_plan import plan_profile
from gapless.runtime.simulation.profiling.session import missing

SMALL = ["model=tiny", "parallel.threads=1", "max_tokens=32", "max_context=64", "max_decodes=4", "cache.num_blocks=64"]


def config(*overrides: str) -> ProfileConfig:
    return compose.compose_one(overrides, ProfileConfig, "profile")


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_one_rank_goes_on_where_it_was_stopped_and_is_checked_and_simulated(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = here / "profiles" / "tiny_cpu_pp1"
    plan = plan_profile(config(*SMALL))
    before = plan.operators[::2]
    stopped = ProfileFolder(folder)
    stopped.begin(plan.about, {})
    stopped.add_operators([OperatorSample(0, point, dict.fromkeys(OPERATORS, 1e-3)) for point in before])
    assert main(["profile", *SMALL, "samples=1"]) == 0
    assert {file.name for file in folder.iterdir()} == {"profile.yaml", "operators.csv", "stages.csv"}
    samples = stopped.operators()
    assert [sample.point for sample in samples[: len(before)]] == before
    assert sorted(sample.point for sample in samples) == sorted(plan.operators)
    parts = ("preproj", "attn", "postproj", "ffn_ln1", "ffn_ln2", "others")
    first = rows(folder / "operators.csv")
    for row in first[len(before) :]:
        layers = plan.about.num_layers * sum(float(row[f"{name}_ms"]) for name in parts)
        whole = layers + sum(float(row[f"{name}_ms"]) for name in ("embedding", "step", "head"))
        assert whole == pytest.approx(float(row["total_ms"]), rel=1e-3)
        assert min(float(row[f"{name}_ms"]) for name in (*parts, "embedding", "step", "head")) > 0
    assert len(rows(folder / "stages.csv")) == len(plan.mixed)
    told = capsys.readouterr()
    assert "held-out points" in told.out
    assert "whole stages" in told.out
    assert "profile  profiles/tiny_cpu_pp1" in told.out

    assert main(["profile", *SMALL, "samples=1"]) == 0  # nothing is missing
    assert rows(folder / "operators.csv") == first
    assert len(rows(folder / "stages.csv")) == len(plan.mixed)

    assert main(["profile", "check=profiles/tiny_cpu_pp1"]) == 0
    assert not (here / "profiles" / "shipped_cpu_pp1").exists()
    assert main(["profile", *SMALL, "model.dtype=bfloat16", "hydra.run.dir=profiles/tiny_cpu_pp1"]) == 2
    assert "contains measurements with dtype=float32, not bfloat16" in capsys.readouterr().err

    simulated = [
        "simulate",
        "model=tiny",
        "hardware=cpu",
        "parallel=local",
        "cache.num_blocks=64",
        "scheduler.batch=4",
        "workload=fixed",
        "workload.input_len=20",
        "workload.output_len=5",
        "workload.num_prompts=6",
        "simulation.profile=profiles/tiny_cpu_pp1",
    ]
    assert main([*simulated, "hydra.run.dir=out"]) == 0
    assert json.loads((here / "out" / "summary.json").read_text())["completed"] == 6
    assert main([*simulated, "parallel=pp2", "hydra.run.dir=out2"]) == 2
    assert "has no sends between stages" in capsys.readouterr().err
    assert main([*simulated, "hardware=a100-80g", "hydra.run.dir=out2", "model.dtype=float32"]) == 2
    assert "measured on hardware=cpu, not a100-80g" in capsys.readouterr().err


@pytest.mark.slow
def test_stages_side_by_side_and_what_lies_between_them(tmp_path: Path, ray_launcher: RayLauncher) -> None:
    two = config(*SMALL, "parallel=pp2", "samples=2")
    plan, folder, errors = plan_profile(two), ProfileFolder(tmp_path), Console(stderr=True)
    assert (plan.about.ranks, plan.setup.pp) == (2, 2)
    folder.begin(plan.about, {})
    profile.measure_operators(plan, folder, 1, errors)
    profile.measure_pipeline(plan, folder, 2, errors, ray_launcher)
    samples = folder.operators()
    assert {s.stage for s in samples} == {0, 1}
    assert len(samples) == 2 * len(plan.operators)
    assert {s.seconds["embedding"] > 0 for s in samples if s.stage == 0} == {True}
    stages = folder.stages()
    assert len(stages) == 2 * 2 * (len(plan.mixed) + len(plan.sent))
    assert all(s.compute > 0 and s.wait > -1e-4 for s in stages)
    assert all((s.result is not None) is (s.stage == 1) for s in stages)
    measured = read_measured(str(tmp_path), plan.plan.arch, pp=2, tp=1, dtype="float32")
    assert measured.operators.host.dispatch > 0
    assert measured.operators.host.result > 0
    assert measured.operators.send(16, link=StageLink(False), scatter_gather=False) > 0
    profile.show_errors(Console(quiet=True), folder)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny", "shipped"])
def test_tensor_parallel_ranks_measure_as_one(model: str, tmp_path: Path) -> None:
    """Layer by layer, and where decodes go through all layers of `shipped` in one C++ call."""
    plan = plan_profile(
        config(
            f"model={model}",
            "parallel=tp2",
            "parallel.threads=1",
            "max_tokens=16",
            "max_context=16",
            "max_decodes=1",
            "num_layers=2",
        )
    )
    folder = ProfileFolder(tmp_path)
    folder.begin(plan.about, {})
    profile.measure_operators(plan, folder, 1, Console(stderr=True))
    samples = folder.operators()
    assert (plan.about.tp, plan.about.ranks) == (2, 2)
    assert [(s.stage, s.point) for s in sorted(samples)] == [(0, point) for point in sorted(plan.operators)]
    parts = ("preproj", "attn", "postproj", "ffn_ln1", "ffn_ln2", "others")
    for each in samples:
        assert min(each.seconds[name] for name in parts) > 0
        layers = 2 * sum(each.seconds[name] for name in parts)
        whole = layers + sum(each.seconds[name] for name in ("embedding", "step", "head"))
        assert whole == pytest.approx(each.seconds["total"], rel=1e-3)
    read_measured(str(tmp_path), plan.plan.arch, pp=1, tp=2, dtype="float32")
    with pytest.raises(ConfigError, match=f"measured {model} with tp=2; this model has tp=1"):
        read_measured(str(tmp_path), plan.plan.arch, pp=1, tp=1, dtype="float32")


def test_what_is_missing_is_measured_in_rounds() -> None:
    points = [Point(chunk=n) for n in range(1, 9)]
    todo = missing(points, 3, Counter(points[:4] + points[:2]), seed=0)
    assert Counter(todo) == {point: 3 - (2 if i < 2 else 1 if i < 4 else 0) for i, point in enumerate(points)}
    assert set(todo[:4]) == set(points[4:])  # what has none comes first
    assert missing(points, 3, Counter(points * 3), seed=0) == []


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["samples=0"], "samples=0: must be 1 or more"),
        (["max_tokens=4"], "max_tokens=4: must be 16 or more"),
        (["neighbours=-1"], "neighbours=-1: must be null or 0 or more"),
        (["model=tiny", "max_context=100000"], "max_context=100000: must be at most the model's "),
        (["check=none"], "check=none: contains no profile (profile.yaml); create one with gapless profile"),
        (["sampls=3"], "sampls: unknown key; did you mean 'samples'?"),
    ],
)
def test_mistakes_are_one_line(overrides: list[str], line: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *overrides]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"gapless: error: {line}")
    assert told.count("\n") == 1
    assert not list(here.iterdir())


@pytest.mark.gpu
def test_on_a_gpu_operators_add_up_too(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    found = config(*SMALL[:1], "hardware=h200", "samples=1", "max_tokens=256", "max_context=256", "pipeline=false")
    plan, folder = plan_profile(found), ProfileFolder(tmp_path)
    folder.begin(plan.about, {})
    profile.measure_operators(plan, folder, 1, Console(stderr=True))
    for sample in folder.operators():
        parts = sum(sample.seconds[name] for name in ("preproj", "attn", "postproj", "ffn_ln1", "ffn_ln2", "others"))
        whole = plan.about.num_layers * parts + sum(sample.seconds[name] for name in ("embedding", "step", "head"))
        assert whole == pytest.approx(sample.seconds["total"], rel=1e-2)


def test_a_check_reads_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="contains no profile"):
        profile.show_errors(Console(quiet=True), ProfileFolder(tmp_path))
