"""The GPU measurements: all lists on a CPU at tiny sizes, their processes, and the work that they count."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu import attention, gather, model, ranks, versions
from benchmarks.gpu import measure as measure_module
from benchmarks.gpu.engine import SAMPLING
from benchmarks.gpu.goals import bytes_read, flops
from benchmarks.gpu.measured_times import OF_A_LAYER, OF_A_STAGE, MeasuredTimes
from benchmarks.gpu.parts import LISTS, Part, Task, chosen
from benchmarks.gpu.rows import Row, checked, figure, missing, summary, table
from benchmarks.gpu.versions import backend_names
from benchmarks.gpu.worker import Worker
from benchmarks.paper.one_gpu import decodes
from benchmarks.support.results import ROOT
from gapless.conf.schema import ModelConfig
from gapless.models.memory import kv_bytes_per_token, weight_bytes
from gapless.models.stage import Stage
from gapless.models.stage_spec import StageSpec
from gapless.parallel.mesh import Mesh
from gapless.runtime.simulation.cost.stage_costs import MicroBatchShape
from tests.benchmarks.test_results import check

COMMAND = (sys.executable, "-m", "benchmarks.gpu")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it runs for minutes")
def test_without_a_gpu_and_without_an_installed_gapless() -> None:
    hide = (
        "import sys; sys.path = [p for p in sys.path if not p.endswith('/src')]; "
        "import runpy; runpy.run_module('benchmarks.gpu', run_name='__main__')"
    )
    done = run(sys.executable, "-c", f"import sys; sys.argv = ['benchmarks.gpu', 'first']; {hide}")
    expected = f"no CUDA device here (torch {torch.__version__}); --device cpu --small runs it at tiny sizes"
    assert (done.returncode, done.stdout) == (1, f"benchmarks.gpu first: {expected}\n"), done.stderr


def measure(name: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """Return what a list prints and writes on a CPU."""
    options = ("--device", "cpu", "--small", "--out", str(folder), "--runs", str(folder))
    done = run(*COMMAND, name, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((folder / f"gpu_{name}_cpu.json").read_text(encoding="utf-8"))
    check(result)
    page = (folder / f"gpu_{name}_cpu.md").read_text(encoding="utf-8")
    assert page.startswith(f"# `{result['command']}`\n")
    assert f"(gpu_{name}_cpu.json)" in page
    tables = result["measurements"][0]["tables"]
    rows = [row for table in tables.values() for row in table]
    assert list(tables) == [part.name for part in LISTS[name].parts]
    assert all(row["status"] != "FAIL" for row in rows)
    assert len(done.stdout.splitlines()) == len(rows) + 3  # the machine, the head, the counts
    assert re.search(r"^\d+ passed, 0 failed, ", done.stdout.splitlines()[-1])
    assert "\n".join(done.stdout.splitlines()[1:-1]) in page
    return done.stdout, tables


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return measure("figures", tmp_path_factory.mktemp("gpu"))[1]


@pytest.mark.slow
def test_the_first_contact_runs_on_a_cpu_at_tiny_sizes(tmp_path: Path) -> None:
    _, tables = measure("first", tmp_path)
    assert {row["setting"] for row in tables["engine"]} == {"", *SAMPLING}
    assert {row["goal"] for row in tables["goals"]} == {None, 0.65, 0.8, 0.1}
    equal = {"eager execution", "a second replay"}
    kinds = {row["quantity"].removeprefix("logits that differ from ") for row in tables["graphs"] if row["goal"] == 0}
    assert kinds == equal


@pytest.mark.slow
def test_a_rank_that_is_killed_under_torchrun_changes_no_output(tmp_path: Path) -> None:
    task = Task("cpu", True, tmp_path, ())
    list(ranks.one(task))
    rows = list(ranks.kill_pp2(task))
    assert all(row.status != "FAIL" for row in rows)
    assert "fault, start (s)" in {row.quantity for row in rows}


@pytest.mark.slow
def test_every_figure_has_the_paper_s_beside_it(figures: dict[str, Any]) -> None:
    assert all(row["value"] is not None for table in figures.values() for row in table)
    for name in ("figure3", "figure4", "figure7", "figure13"):
        assert all(row["paper"] is not None and row["value"] > 0 for row in figures[name]), name


@pytest.mark.slow
def test_figures_have_the_rows_of_the_simulated_ones(figures: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    rows = [row for name in ("table2", "figure3", "figure7", "figure8", "figure13") for row in figures[name]]
    assert len(rows) > 30
    for row in rows:
        if row["paper"] is not None:
            assert f"| {row['quantity']} | " in page, row


def test_lists_fit_their_time_and_their_parts_are_there() -> None:
    assert sum(part.budget_s for part in LISTS["figures"].parts) <= LISTS["figures"].total_s
    for name, wanted in LISTS.items():
        assert wanted.total_s <= 540, name
        processes = [part.process or part.name for part in wanted.parts]
        assert name == "figures" or len(set(processes)) == len(processes), "each has a process of its own"
        for part in wanted.parts:
            assert callable(part.load()), part


def test_a_part_brings_what_it_needs_and_an_unknown_one_is_named() -> None:
    names = [part.name for part in chosen("figures", ["simulate", "plain"])]
    assert names == ["floor", "plain", "profile", "simulate"]
    done = run(*COMMAND, "figures", "--only", "table2,figure9")
    assert done.returncode == 2
    assert "--only figure9: no such part; there are floor, figure4, " in done.stderr
    done = run(*COMMAND, "first", "--device", "cpu")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        2,
        "python -m benchmarks.gpu: error: --device cpu: a model of 13B takes hours there; add --small",
    )


@pytest.mark.slow
def test_what_the_time_does_not_reach_fails_and_is_named(tmp_path: Path) -> None:
    parts = [Part(name, f"tests.support.gpu_parts:{name}", 60.0) for name in ("hangs", "works")]
    rows = list(measure_module.run(parts, Task("cpu", True, tmp_path, ()), 8.0))
    assert [(row.part, row.status) for row in rows][-2:] == [("hangs", "FAIL"), ("works", "FAIL")]
    assert rows[-2].note.startswith("timed out after 8 s")
    assert rows[-1].note == "not run: the 8 s of the list have passed"


@pytest.mark.parametrize(("cuda", "status"), [("12.8", "FAIL"), ("13.0", "skip")])
def test_a_backend_that_has_to_run_and_does_not_is_a_failure(
    cuda: str, status: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(versions, "backend_names", lambda _: ["sdpa", "xformers"])
    monkeypatch.setattr(torch.version, "cuda", cuda)
    rows = {row.setting: row for row in versions.versions(Task("cpu", True, tmp_path, ()))}
    assert rows["sdpa, heads of 64"].status == "ok"
    assert rows["xformers, heads of 64"].status == status
    assert "model.attention=xformers: " in rows["xformers, heads of 64"].note


def test_batches_for_attention_have_nothing_in_order() -> None:
    assert {"auto", *backend_names("cuda")} == set(get_args(get_type_hints(ModelConfig)["attention"]))
    for case in attention.cases(16, small=False):
        segments = [*case.batch.chunks, *case.batch.decodes]
        blocks = [block for each in segments for block in each.blocks[: -(-each.context // 16)]]
        assert len(set(blocks)) == len(blocks)
        assert max(blocks) < case.num_blocks
        if len(segments) > 2:
            starts = [segment.start for segment in segments]
            assert starts != sorted(starts)
            assert blocks != sorted(blocks)
    sizes = {len(case.batch.decodes) for case in attention.cases(16, small=False)}
    assert {1, 256} <= sizes


def test_a_list_s_rows_are_counted_and_empty_columns_left_out() -> None:
    rows = [
        checked("a", "wrong", "", 0, 0),
        missing("b", "backend", "", "not there\nand more"),
        figure("c", "ms", "", 1.5),
    ]
    assert summary(rows) == "1 passed, 1 failed, 1 figures"
    assert table(rows).splitlines()[0].split() == ["part", "quantity", "value", "goal"]
    assert "not there" in table(rows)
    assert "and more" not in table(rows)
    assert missing("b", "backend", "", "").status == "FAIL"


def test_no_wheel_is_gathered_that_first_does_without() -> None:
    wanted = {gather.name_of(text) for text in gather.requirements(is_cuda12=False)}
    assert wanted >= {"torch", "megatron_core", "hydra_core", "pytest", "transformers"}
    assert wanted.isdisjoint({"ray", "matplotlib", "starlette", "xformers"})
    assert "xformers" in {gather.name_of(text) for text in gather.requirements(is_cuda12=True)}
    pins = gather.constraints(ROOT / "constraints-cuda12.txt", ["numpy==2.5.2", "hydra-core==1"])
    assert {"numpy", "hydra_core"}.isdisjoint(map(gather.name_of, pins))
    assert {"torch", "omegaconf"} <= set(map(gather.name_of, pins))


def test_pip_takes_a_stub_for_the_package_that_is_there(tmp_path: Path) -> None:
    gather.stub("torch==2.11.0", tmp_path)
    pip = (sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--no-index", "--ignore-installed")
    done = run(*pip, "--report", "-", "--find-links", str(tmp_path), "torch>=2.10", f"torch===2.11.0{gather.THERE}")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["install"]
    assert found["metadata"]["version"] == f"2.11.0{gather.THERE}"


@pytest.fixture
def worker() -> Iterator[Worker]:
    found = Worker()
    yield found
    found.stop()


@pytest.mark.slow
def test_a_part_that_fails_hangs_or_dies_does_not_stop_the_next(worker: Worker, tmp_path: Path) -> None:
    task = Task("cpu", True, tmp_path, ())

    def rows(name: str, budget_s: float = 120.0) -> list[Row]:
        return list(worker.run(Part(name, f"tests.support.gpu_parts:{name}", budget_s, "one"), task))

    processes = [rows("works")[0].value for _ in range(2)]
    assert processes[0] == processes[1]
    for name, why, budget_s in (
        ("fails", "RuntimeError: CUDA error: an illegal memory access was encountered", 120.0),
        ("hangs", "timed out after 3 s", 3.0),
        ("dies", "its process died (exit code 7)", 120.0),
    ):
        first, last = rows(name, budget_s)
        assert (first.value, first.status) == (1.0, "")
        assert (last.part, last.status, last.note) == (name, "FAIL", why)
        (row,) = rows("works")
        assert row.value not in processes
        processes.append(row.value)


def test_fewer_layers_where_the_memory_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    arch = model.architecture("llama-13b", small=False)
    free = {80: 40, 40: 0, 24: 0}
    for gib in free:
        monkeypatch.setattr(model, "free_bytes", lambda _, gib=gib: gib << 30)
        free[gib] = model.layers_that_fit(arch, "cuda", model.KV_TOKENS)
        of_a_layer = 2 * arch.layer_params + model.KV_TOKENS * kv_bytes_per_token(arch, 1, 1, 2)
        beside = 4 * arch.embedding_params
        assert free[gib] * of_a_layer + beside <= gib << 30
        assert free[gib] == 40 or (free[gib] + 1) * of_a_layer + beside > gib << 30
    assert free[80] == 40 > free[40] > free[24] > 0
    monkeypatch.setattr(model, "free_bytes", lambda _: 1 << 30)
    with pytest.raises(MemoryError, match="no layer of"):
        model.layers_that_fit(arch, "cuda", model.KV_TOKENS)


class FixedProbe:
    """Each operator takes a second in every iteration."""

    def measure(self, compute: object) -> dict[str, float]:
        return dict.fromkeys((*OF_A_LAYER, *OF_A_STAGE), 1.0)


def test_times_stand_for_all_layers_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    arch = model.architecture("llama-13b", small=True)
    with model.start("cpu") as groups:
        stage = model.random_stage(arch, groups, 256)
        monkeypatch.setattr("benchmarks.gpu.measured_times.Probe", lambda _: FixedProbe())
        times = MeasuredTimes(stage, 40)
        parts = times.breakdown(decodes(2, 40))
        assert {name: parts[name] for name in OF_A_LAYER} == dict.fromkeys(OF_A_LAYER, 40.0)
        assert {name: parts[name] for name in OF_A_STAGE} == dict.fromkeys(OF_A_STAGE, 1.0)
        assert times.seconds(decodes(2, 40)) == [40.0 * 6 + 3]
        assert times.fits(decodes(5, 40))
        with pytest.raises(ValueError, match="288 KV slots do not fit the stage's 256"):
            times.breakdown(decodes(6, 40))


def test_flops_are_those_that_torch_counts() -> None:
    """Attention apart: torch counts every pair of a query and a key, also those that the mask hides."""
    arch = replace(model.architecture("llama-13b", small=True), num_layers=3)
    shape = MicroBatchShape(((48, 16),), sampled=1)
    with model.start("cpu") as groups:
        plain = ModelConfig(architecture=arch, dtype="float32", attention="sdpa", kernels="torch")
        stage = Stage(StageSpec(model=plain, arch=arch, layers=(0, 3), num_blocks=4, block_size=16), groups)
        for parameter in stage.parameters():
            torch.nn.init.normal_(parameter)
        inputs = stage.prepare(model.batch_of(shape))
        with FlopCounterMode(display=False) as counter:
            stage(inputs)
    products = {torch.ops.aten.mm, torch.ops.aten.addmm}
    counted = sum(n for operator, n in counter.get_flop_counts()["Global"].items() if operator in products)
    pairs = 2 * (48 * 16 + 48 * 49 / 2) + 64  # two layers of all rows, one of the row that samples
    assert counted == flops(arch, shape) - 4 * arch.num_heads * arch.head_dim * pairs


def test_bytes_of_decodes_are_weights_and_cache() -> None:
    arch = model.architecture("llama-13b", small=False)
    norms = (2 * arch.num_layers + 1) * arch.hidden_size
    weights = weight_bytes(arch, Mesh(1, 1), range(arch.num_layers), 2) - 2 * arch.embedding_params
    expected = weights + 18 * 1024 * kv_bytes_per_token(arch, arch.num_layers, 1, 2)
    assert bytes_read(arch, decodes(18, 1024), 2) == pytest.approx(expected, abs=2 * norms)
