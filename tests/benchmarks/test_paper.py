"""Tests of the paper's experiments at a small size, and of the bound that no policy is faster than."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import paper as experiments
from benchmarks.paper import EXPERIMENTS, Row, write_artifact
from benchmarks.paper.__main__ import main as command
from benchmarks.paper.bound import bubble_free_seconds, lower_envelope
from benchmarks.paper.figure12 import EQUAL, SARATHI, TENSOR, systems
from benchmarks.paper.figure13 import chunked_prefill
from benchmarks.paper.one_gpu import (
    baseline,
    costs_of,
    decode_speedup,
    equal_requests,
    makespan,
    operator_seconds,
    prefill,
    run_policy,
    sarathi,
)
from gapless.conf.build import build, load_group
from gapless.conf.errors import ConfigError
from gapless.conf.policies import POLICY_CONFIGS, EqualTimeConfig, SarathiConfig, SchedulerConfig
from gapless.conf.schema import ParallelConfig, SimulateConfig
from gapless.conf.workloads import FixedConfig
from gapless.models.tokenizer import load_tokenizer
from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.core.run_record import RunRecord
from gapless.runtime.engine.plan import make_plan
from gapless.runtime.simulation.pipeline.make_costs import make_costs
from gapless.runtime.simulation.pipeline.replicas import make_replicas, run_fleet
from gapless.runtime.simulation.pipeline.setting import make_setting
from gapless.runtime.simulation.workload import make_workload
from tests.support.tiers import examples


def config_of(model: str, parallel: str, scheduler: str, workload: str, **keys: object) -> SimulateConfig:
    groups = {
        "model": model,
        "hardware": "a100-80g",
        "parallel": parallel,
        "scheduler": scheduler,
        "workload": workload,
    }
    config = build(SimulateConfig, {group: load_group(group, name) for group, name in groups.items()})
    return replace(config, workload=replace(config.workload, **keys))  # type: ignore[arg-type]


def simulate(config: SimulateConfig, name: str = "") -> Sequence[RunRecord]:
    arch = make_plan(config).arch
    workload = make_workload(
        config.workload, vocab_size=arch.vocab_size, context=arch.max_position, tokenizer=load_tokenizer(None, 300)
    )
    replicas = make_replicas(make_setting(config))
    for _ in run_fleet(replicas, workload.without_prompts()):
        pass
    return [replica.record for replica in replicas]


def one_gpu(num_prompts: int = 1) -> SimulateConfig:
    return config_of("llama-13b", "local", "sarathi", "fixed", num_prompts=num_prompts)


def figure12(num_prompts: int) -> SimulateConfig:
    lengths = {"min_len": 64, "max_len": 256}
    config = config_of("gpt3-175b", "tp8_pp8", "sarathi", "zipf", num_prompts=num_prompts, **lengths)
    return replace(config, scheduler=SarathiConfig(batch=27, chunk=256))


# Figures 9 and 13 are left out for their many runs, of the kind that Figure 11 makes too.
@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name not in ("figure9", "figure13")])
def test_each_compares_with_the_paper_and_draws(name: str, tmp_path: Path) -> None:
    artifact = EXPERIMENTS[name](figure12(24) if name == "figure12" else one_gpu(), simulate)
    word = f"{name[:5].title()} {name[5:]}" if name.startswith("table") else f"{name[:6].title()} {name[6:]}"
    assert {row.artifact for row in artifact.rows} == {word}
    assert artifact.title.startswith(word)
    for row in artifact.rows:
        assert 0 < row.ours < math.inf, row
    assert any(row.paper is not None for row in artifact.rows)
    assert len({(row.quantity, row.setting) for row in artifact.rows}) == len(artifact.rows)
    figures = write_artifact(tmp_path, artifact)
    assert len(figures) == len(artifact.charts) > 0
    page = (tmp_path / "paper.md").read_text(encoding="utf-8")
    assert all(f"({figure.name})" in page for figure in figures)
    written = json.loads((tmp_path / "paper.json").read_text(encoding="utf-8"))
    assert [Row(**row) for row in written] == list(artifact.rows)


def test_deviation_is_ours_over_the_paper_s() -> None:
    assert Row("Table 2", "", "", 2.0, 2.5).deviation == 0.25
    assert Row("Table 2", "", "", None, 2.5).deviation is None
    assert [Row("Table 2", "", "", 2.0, ours, "<=").deviation for ours in (1.0, 2.5)] == [0.0, 0.25]
    assert [Row("Table 2", "", "", 2.0, ours, ">=").deviation for ours in (1.5, 3.0)] == [-0.25, 0.0]


def test_a_decode_is_cheaper_beside_a_chunk_and_less_so_in_larger_batches() -> None:
    costs = costs_of(one_gpu())
    speedups = [decode_speedup(costs, batch, 1024) for batch in (4, 10, 18)]
    assert speedups == sorted(speedups, reverse=True)
    assert speedups[-1] > 1


def test_a_prefill_costs_more_in_smaller_chunks() -> None:
    costs = costs_of(one_gpu())
    whole, *chunked = (sum(chunked_prefill(costs, 1024, chunk).values()) for chunk in (1024, 512, 256, 128))
    assert whole == pytest.approx(costs.seconds(prefill(1024))[0])
    assert [whole, *chunked] == sorted([whole, *chunked])


def test_requests_are_alike_and_fill_the_baseline_s_batches() -> None:
    assert equal_requests(one_gpu(50), 1024, 14, 18).workload.num_prompts == 36
    assert equal_requests(one_gpu(50), 3072, 14, 6).workload.num_prompts == 12
    record = run_policy(equal_requests(one_gpu(50), 1024, 14, 18), baseline(18), simulate, "")
    assert {(request.prompt_tokens, request.output_tokens) for request in record.requests} == {(956, 68)}
    assert all(not micro_batch.chunks or not micro_batch.decodes for micro_batch in record.micro_batches)
    assert {len(micro_batch.decodes) for micro_batch in record.micro_batches if not micro_batch.chunks} == {18}


@pytest.mark.parametrize("policy", [baseline(6), sarathi(6)])
def test_operators_of_a_run_sum_to_its_compute(policy: SchedulerConfig) -> None:
    config = equal_requests(one_gpu(6), 1024, 10, 6)
    record = run_policy(config, policy, simulate, "")
    total = sum(operator_seconds(record, costs_of(config)).values())
    assert total == pytest.approx(Ledger(record).busy_seconds(), rel=1e-9)
    assert total <= makespan(record) * (1 + 1e-9)


def test_figure_12_is_the_paper_s_three_systems_and_ours() -> None:
    by_name = systems(figure12(10))
    grids = {
        name: (each.parallel.pp, each.parallel.tp, each.simulation.replicas, make_plan(each).limits.batch)
        for name, each in by_name.items()
    }
    assert grids[SARATHI] == (8, 8, 1, 27)
    assert grids[TENSOR] == (1, 8, 8, 11)
    assert isinstance(by_name[EQUAL].scheduler, EqualTimeConfig)


def test_keys_that_are_given_hold_over_an_experiment_s_own() -> None:
    config = experiments.config_of("figure12")
    assert (config.model.name, config.parallel.pp, config.scheduler.batch) == ("gpt3-175b", 8, 27)
    assert (config.workload.num_prompts, config.simulation.host) == (10000, False)
    config = experiments.config_of("figure12", ["workload.num_prompts=5", "simulation.host=true", "hardware=h200"])
    assert (config.workload.num_prompts, config.simulation.host, config.hardware.name) == (5, True, "h200")
    assert {name: experiments.config_of(name).scheduler.name for name in EXPERIMENTS} == dict.fromkeys(
        EXPERIMENTS, "sarathi"
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["figure1"], "figure1: unknown; did you mean 'figure13'?"),
        (["figure9", "scheduler=orca_best,sarathi"], "scheduler: figure9 runs policies of its own, each once"),
        (
            ["table4", "scheduler=orca_best"],
            "scheduler=orca_best: table4 runs policies of its own, as the paper has them",
        ),
        (["figure9", "simulation.record=false"], "simulation.record=false: figure9 counts what each request lost"),
        (["figure9", "repeats=2"], "repeats: figure9 runs policies of its own, each once"),
        (["figure9", "scheduler.chnk=2"], "scheduler.chnk: unknown key; did you mean 'scheduler.chunk'?"),
        (["figure12", "scheduler=equal_time"], "scheduler=equal_time: figure12 runs orca_best, sarathi and equal_time"),
    ],
)
def test_a_wrong_key_is_one_line(words: list[str], line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}"):
        experiments.config_of(words[0], words[1:])


def test_the_command_prints_and_writes_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(["table2", "figure7", "hardware=a100-80g"]) == 0
    output = capfd.readouterr().out
    for word in ("Table 2", "Figure 7"):
        assert word in output
        folder = tmp_path / "runs/paper_other" / word.lower().replace(" ", "")
        assert {row["artifact"] for row in json.loads((folder / "paper.json").read_text(encoding="utf-8"))} == {word}
        assert list(folder.glob("*.png"))
    assert not (tmp_path / "docs").exists()
    assert not (tmp_path / "runs/paper").exists()  # no later page is made of other keys


def test_a_model_that_does_not_fit_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        command(["figure9", "hardware.memory_gib=1"])
    assert ended.value.code == 2
    assert "hardware.memory_gib" in capfd.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("policy", [SarathiConfig(), EqualTimeConfig()])
def test_auto_finds_the_chunk_of_figure_12(policy: SarathiConfig | EqualTimeConfig) -> None:
    """With GPT-3 a stage saturates only at chunks that are larger than the decodes can make use of."""
    config = config_of("gpt3-175b", "tp8_pp8", "sarathi", "zipf", num_prompts=400)
    makespans = {}
    for chunk in (256, "auto"):
        (record,) = simulate(replace(config, scheduler=replace(policy, chunk=chunk)))
        makespans[chunk] = max(span.end for span in record.spans)
    assert makespans["auto"] <= 1.02 * makespans[256]


@settings(max_examples=examples(15))
@given(
    policy=st.sampled_from(sorted(POLICY_CONFIGS)),
    pp=st.sampled_from([1, 2, 4]),
    batch=st.integers(2, 12),
    inputs=st.lists(st.integers(1, 900), min_size=1, max_size=12),
    outputs=st.integers(1, 40),
)
def test_no_policy_is_faster_than_the_bound(policy: str, pp: int, batch: int, inputs: list[int], outputs: int) -> None:
    config = config_of("llama-13b", "tp8", policy, "fixed")
    config = replace(config, parallel=ParallelConfig(pp=pp, tp=8, launcher="ray"))
    config = replace(config, scheduler=replace(config.scheduler, batch=batch))
    plan = make_plan(config)
    costs = make_costs(config, plan)
    (replica,) = make_replicas(make_setting(config))
    drawn = np.array(inputs)
    workload = replace(
        make_workload(
            FixedConfig(num_prompts=len(inputs)),
            vocab_size=100,
            context=4096,
            tokenizer=load_tokenizer(None, 300),
        ),
        input_lens=drawn,
        output_lens=np.full(len(inputs), outputs),
    )
    for _ in run_fleet([replica], workload.without_prompts()):
        pass
    bound = bubble_free_seconds(costs, drawn, np.full(len(inputs), outputs), batch)
    assert 0 < bound <= Ledger(replica.record).span_seconds * (1 + 1e-9)


@given(st.lists(st.floats(0.1, 100), min_size=2, max_size=40))
def test_the_envelope_is_convex_and_below(values: list[float]) -> None:
    x, y = np.arange(len(values)), np.array(values)
    kept = lower_envelope(x.tolist(), y.tolist())
    assert (kept[0], kept[-1]) == (0, len(values) - 1)
    assert (np.interp(x, x[kept], y[kept]) <= y + 1e-9).all()
    slopes = np.diff(y[kept]) / np.diff(x[kept])
    assert (np.diff(slopes) >= -1e-9).all()
