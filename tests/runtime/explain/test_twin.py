"""The twin of a run: from its folder alone, it replays the run, and settings that differ from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gapless.conf.build import build, load_group, to_mapping
from gapless.conf.errors import ConfigError
from gapless.conf.schema import SimulateConfig
from gapless.models.tokenizer import ByteTokenizer
from gapless.runtime.core.run_record import RunRecord
from gapless.runtime.explain.twin import Twin, TwinError, make_twin
from gapless.runtime.run_folder.read import RunFolder, read_run_folder
from gapless.runtime.run_folder.write import write_run_data
from gapless.runtime.simulation.run import simulated
from gapless.runtime.simulation.setting import make_setting
from gapless.runtime.workload import Workload
from gapless.runtime.workload.make import make_workload


def config_of(policy: str = "sarathi", **workload: object) -> SimulateConfig:
    return build(SimulateConfig, {
        "model": load_group("model", "llama-7b"),
        "hardware": load_group("hardware", "a100-80g"),
        "parallel": load_group("parallel", "pp2"),
        "scheduler": load_group("scheduler", policy),
        "workload": load_group("workload", "zipf") | {"num_prompts": 60, "min_len": 100, "max_len": 800} | workload,
    })  # fmt: skip


def workload_of(config: SimulateConfig) -> Workload:
    return make_workload(config.workload, vocab_size=32000, context=2048, tokenizer=ByteTokenizer(32000))


def run(config: SimulateConfig) -> RunRecord:
    return simulated(make_setting(config), workload_of(config))[0].record


def written(path: Path, record: RunRecord, config: SimulateConfig) -> RunFolder:
    write_run_data(path, record, config=to_mapping(config))
    return read_run_folder(path)


def off(error: TwinError) -> float:
    """The largest of all errors."""
    return max(map(abs, (error.makespan, *error.busy, error.bubble, error.p99_tbt, error.p99_ttft)))


@pytest.mark.parametrize(
    "config",
    [
        config_of(),
        config_of("equal_time", request_rate=30.0),
        config_of("orca_best", request_rate=20.0, burstiness=0.25, max_concurrency=16),
        config_of("token_budget", users=3, deadline_ms=100.0, max_concurrency=8),
        replace(config_of(), simulation=replace(config_of().simulation, jitter=0.1, straggler_rate=0.02)),
    ],
    ids=["all at once", "rate", "closed loop and rate", "closed loop", "disturbed"],
)
def test_twin_of_a_simulated_run_is_the_run(tmp_path: Path, config: SimulateConfig) -> None:
    twin = make_twin(written(tmp_path, run(config), config))
    assert off(twin.error) < 1e-6
    assert twin.notes == []


def test_changed_setting_is_that_of_the_changed_config(tmp_path: Path) -> None:
    config = config_of(request_rate=20.0)
    twin = make_twin(written(tmp_path, run(config), config))
    other = twin.changed({"scheduler": "token_budget", "scheduler.budget": 96, "parallel.layers": (14, 18)})
    found = replay_spans(twin, other)
    expected = run(other.config)
    assert found == pytest.approx([span.end for span in expected.spans], abs=1e-6)


def replay_spans(twin: Twin, setting: object) -> list[float]:
    return [span.end for span in twin.replay(setting=setting).spans]  # type: ignore[arg-type]


def test_fleet_is_refused(tmp_path: Path) -> None:
    config = config_of()
    record = run(config)
    written(tmp_path / "replica_0", record, config)
    written(tmp_path / "replica_1", record, config)
    (tmp_path / "summary.json").write_text('{"replicas": 2, "config": {}}')
    with pytest.raises(ConfigError, match="2 pipelines; give the run of one"):
        make_twin(read_run_folder(tmp_path))
