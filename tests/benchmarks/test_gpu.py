"""The GPU measurement: all of it on a CPU at tiny sizes, its processes, and the work that it counts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu import model
from benchmarks.gpu.goals import bytes_read, flops
from benchmarks.gpu.measured_times import OF_A_LAYER, OF_A_STAGE, MeasuredTimes
from benchmarks.gpu.parts import PARTS, TOTAL_S, Part, Task, chosen
from benchmarks.gpu.rows import Row
from benchmarks.gpu.worker import Worker
from benchmarks.support.results import ROOT
from gapless.models.memory import kv_bytes_per_token, weight_bytes
from gapless.models.stage import Stage
from gapless.parallel.mesh import Mesh
from gapless.runtime.cost.stage_costs import MicroBatchShape
from gapless.runtime.experiments.one_gpu import decodes

COMMAND = (sys.executable, "-m", "benchmarks.gpu")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it runs for minutes")
def test_without_a_gpu_and_without_an_installed_gapless() -> None:
    hide = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]; "
        "sys.path = [p for p in sys.path if 'editable' not in p and 'site-packages/gapless' not in p]; "
        "import runpy; runpy.run_module('benchmarks.gpu', run_name='__main__')"
    )
    done = run(sys.executable, "-c", hide)
    expected = "benchmarks.gpu: no CUDA device here; --device cpu --small runs it at tiny sizes\n"
    assert (done.returncode, done.stdout) == (0, expected), done.stderr


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Return what all of it prints and writes on a CPU."""
    folder = tmp_path_factory.mktemp("gpu")
    options = ("--device", "cpu", "--small", "--out", str(folder / "gpu.json"), "--runs", str(folder))
    done = run(*COMMAND, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads((folder / "gpu.json").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_every_part_runs_on_a_cpu_at_tiny_sizes(measured: tuple[str, dict[str, Any]]) -> None:
    printed, result = measured
    tables = result["measurements"][0]["tables"]
    assert list(tables) == [part.name for part in PARTS]
    rows = [row for table in tables.values() for row in table]
    assert all(row["status"] != "FAIL" for row in rows)
    assert all(row["value"] is not None for row in rows if row["status"] != "skip")
    for name in ("figure3", "figure4", "figure7", "figure13"):
        assert all(row["paper"] is not None and row["value"] > 0 for row in tables[name]), name
    assert {row["goal"] for row in tables["goals"]} == {None, 0.65, 0.8, 0.1}
    assert [(row["quantity"], row["setting"]) for row in tables["goals"]] == [
        (row["quantity"], row["setting"]) for row in tables["plain"]
    ]
    assert len(printed.splitlines()) == len(rows) + 3  # the machine, the head, the count of failures
    assert printed.splitlines()[-1].startswith("0 failed, ")


@pytest.mark.slow
def test_figures_have_the_rows_of_the_simulated_ones(measured: tuple[str, dict[str, Any]]) -> None:
    page = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    tables = measured[1]["measurements"][0]["tables"]
    rows = [row for name in ("table2", "figure3", "figure7", "figure8", "figure13") for row in tables[name]]
    assert len(rows) > 30
    for row in rows:
        if row["paper"] is not None:
            assert f"| {row['quantity']} | " in page, row


def test_budgets_add_up_to_less_than_eight_minutes() -> None:
    assert sum(part.budget_s for part in PARTS) <= TOTAL_S <= 480


def test_a_part_brings_what_it_needs_and_an_unknown_one_is_named() -> None:
    assert [part.name for part in chosen(["simulate", "goals"])] == ["floor", "goals", "profile", "simulate"]
    done = run(*COMMAND, "--only", "table2,figure9")
    assert done.returncode == 2
    assert "--only figure9: no such part; there are attention, tokens, " in done.stderr
    done = run(*COMMAND, "--device", "cpu")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        2,
        "python -m benchmarks.gpu: error: --device cpu: a model of 13B takes hours there; add --small",
    )


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
        ("hangs", "over its 3 s", 3.0),
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
        stage = Stage(
            arch, groups, range(3), dtype=torch.float32, attention="sdpa", num_blocks=4, block_size=16, kernels="torch"
        )
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
