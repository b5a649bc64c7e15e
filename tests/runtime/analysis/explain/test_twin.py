"""The twin of a run: from its folder alone, it replays the run, and settings that differ from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gapless.conf.build import build, to_mapping
from gapless.conf.disaggregation import DisaggregationConfig
from gapless.conf.errors import ConfigError
from gapless.conf.policies import OrcaBestConfig, SarathiConfig
from gapless.conf.schema import EngineConfig, SimulateConfig
from gapless.conf.simulation import FaultsConfig
from gapless.runtime.analysis.explain.twin import Twin, make_twin
from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.analysis.run_folder.read import read_run_folder
from gapless.runtime.core.prefix_ids import PrefixIds
from gapless.runtime.core.run_record import FaultRecord, RunRecord
from gapless.runtime.core.work_item import WorkItem
from gapless.runtime.engine.llm import LLM
from gapless.runtime.simulation.pipeline.replicas import make_replicas, run_fleet
from gapless.runtime.simulation.pipeline.setting import make_setting
from tests.support.explained_runs import errors_of, run, runs, simulated_config, written
from tests.support.process_launcher import ProcessLauncher
from tests.support.written_runs import write_data


def off(twin: Twin) -> float:
    """Return the largest of all errors."""
    return max(map(abs, errors_of(twin.replay(), twin.base).values()))


def ends(record: RunRecord) -> list[float]:
    return [span.end for span in record.spans]


@pytest.mark.parametrize(
    "config",
    [
        simulated_config(),
        simulated_config("equal_time", request_rate=30.0),
        simulated_config("orca_best", request_rate=20.0, burstiness=0.25, max_concurrency=16),
        simulated_config("token_budget", users=3, deadline_ms=100.0, max_concurrency=8),
        replace(simulated_config(), simulation=replace(simulated_config().simulation, jitter=0.1, straggler_rate=0.02)),
        replace(
            simulated_config(request_rate=30.0),
            simulation=replace(simulated_config().simulation, faults=FaultsConfig(at=(0.5, 1.5))),
        ),
    ],
    ids=["all at once", "rate", "closed loop and rate", "closed loop", "disturbed", "faults"],
)
def test_twin_of_a_simulated_run_is_the_run(tmp_path: Path, config: SimulateConfig) -> None:
    twin = make_twin(written(tmp_path, run(config), config))
    assert off(twin) < 1e-6
    assert twin.notes == []
    assert len(twin.replay().faults) == len(twin.base.faults)


def test_changed_setting_is_that_of_the_changed_config(tmp_path: Path) -> None:
    config = simulated_config(request_rate=20.0)
    twin = make_twin(written(tmp_path, run(config), config))
    other = twin.changed({"scheduler": "token_budget", "scheduler.max_batched_tokens": 96, "parallel.layers": (14, 18)})
    assert ends(twin.replay(setting=other)) == pytest.approx(ends(run(other.config)), abs=1e-6)


def test_another_policy_keeps_the_keys_that_all_policies_have(tmp_path: Path) -> None:
    config = simulated_config()
    config = replace(config, scheduler=SarathiConfig(chunk=96, max_batch=12, order="shortest_prompt"))
    twin = make_twin(written(tmp_path, run(config), config))
    assert twin.changed({"scheduler": "orca_best"}).config.scheduler == OrcaBestConfig(
        max_batch=12, order="shortest_prompt"
    )


def test_shared_prefixes_are_found_again(tmp_path: Path) -> None:
    """Prompts that begin with one of two long texts: the replay computes what the run computed."""
    config = simulated_config()
    [replica] = make_replicas(make_setting(config))
    items = [
        WorkItem(bytes(320 + n), 8, 0.02 * n, prefix=PrefixIds([100 * (n % 2) + k for k in range(15)] + [1000 + n], 16))
        for n in range(40)
    ]
    for _ in run_fleet([replica], items):
        pass
    assert sum(request.cached_tokens for request in replica.record.requests) > 5000
    twin = make_twin(written(tmp_path, replica.record, config))
    replayed = twin.replay()
    assert [r.cached_tokens for r in replayed.requests] == [r.cached_tokens for r in replica.record.requests]
    assert ends(replayed) == pytest.approx(ends(replica.record), abs=1e-6)


def test_time_of_faults_is_left_out_where_times_are_learned(tmp_path: Path) -> None:
    config = simulated_config(request_rate=30.0)
    record = run(replace(config, simulation=replace(config.simulation, faults=FaultsConfig(at=(0.5, 1.5)))))
    assert sum(fault.seconds or 0.0 for fault in record.faults) > 2
    mapping = to_mapping(config)
    del mapping["simulation"]
    write_data(tmp_path, record, mapping)
    twin = make_twin(read_run_folder(tmp_path))
    assert twin.notes == ["2 faults left out, with downtime and recomputation"]
    assert -0.2 < twin.error["duration"] < 0.02  # what was computed again took a tenth


def test_profile_that_is_gone_leaves_times_to_be_learned(tmp_path: Path) -> None:
    config = simulated_config()
    record = run(config)
    gone = replace(config, simulation=replace(config.simulation, profile=str(tmp_path / "gone")))
    twin = make_twin(written(tmp_path / "run", record, gone))
    assert abs(twin.error["duration"]) < 0.02
    assert "learned from the run" in twin.notes[0]


def test_model_that_is_gone(tmp_path: Path) -> None:
    """Other policies can be replayed; layers, of which nothing is known, cannot be split otherwise."""
    config = simulated_config()
    mapping = to_mapping(config)
    del mapping["simulation"]
    mapping["model"] |= {"weights": str(tmp_path / "gone"), "architecture": None}
    write_data(tmp_path / "run", run(config), mapping)
    twin = make_twin(read_run_folder(tmp_path / "run"))
    assert abs(twin.error["duration"]) < 0.05
    other = run(replace(config, scheduler=OrcaBestConfig()))
    replayed = twin.replay(setting=twin.changed({"scheduler": "orca_best"}))
    assert Ledger(replayed).span_seconds == pytest.approx(Ledger(other).span_seconds, rel=0.1)
    with pytest.raises(ConfigError, match="cannot split the layers"):
        twin.changed({"parallel.layers": (10, 22)})


def test_one_replica_of_a_fleet(tmp_path: Path) -> None:
    config = simulated_config(request_rate=30.0)
    config = replace(config, simulation=replace(config.simulation, replicas=2))
    for number, replica in enumerate(runs(config)):
        twin = make_twin(written(tmp_path / str(number), replica, config))
        assert off(twin) < 1e-6
        assert twin.notes == ["one of 2 replicas, with the requests and arrival times that its router gave it"]


def test_pools_are_refused(tmp_path: Path) -> None:
    config = simulated_config(request_rate=30.0)
    pools = replace(config.simulation, disaggregation=DisaggregationConfig(prefill_replicas=1))
    config = replace(config, simulation=pools)
    with pytest.raises(ConfigError, match="a prefill or decode pool cannot"):
        make_twin(written(tmp_path, runs(config)[1], config))


def test_drafts_are_accepted_as_often(tmp_path: Path) -> None:
    config = simulated_config()
    config = replace(config, scheduler=SarathiConfig(drafts=4, max_batch=4))
    record = run(replace(config, simulation=replace(config.simulation, draft_acceptance=0.8)))
    mapping = to_mapping(config)
    del mapping["simulation"]
    write_data(tmp_path, record, mapping)
    twin = make_twin(read_run_folder(tmp_path))
    found = [sum(m.accepted for m in each.micro_batches) for each in (record, twin.replay())]
    assert found[0] > 100
    assert found[1] == pytest.approx(found[0], rel=0.1)
    assert abs(twin.error["duration"]) < 0.1


def test_what_cannot_be_replayed_is_refused_in_one_line(tmp_path: Path) -> None:
    config = simulated_config()
    record = run(config)
    written(tmp_path / "fleet" / "replica_0", record, config)
    written(tmp_path / "fleet" / "replica_1", record, config)
    (tmp_path / "fleet" / "summary.json").write_text('{"replicas": 2, "config": {}}')
    write_data(tmp_path / "no_config", record, {})
    mapping = to_mapping(config)
    del mapping["simulation"]
    record.faults.append(FaultRecord(1, "process", "rank 1 ended", 1.0, 1.1, up=1.2, stages=1))
    write_data(tmp_path / "fewer", record, mapping)
    empty = RunRecord(2, 100, requests=record.requests, batch=8, depth=2)
    write_data(tmp_path / "empty", empty, mapping)
    for name, line in (
        ("fleet", "contains 2 pipelines; give the folder of one"),
        ("no_config", "contains no config"),
        ("fewer", "continued with fewer stages"),
        ("empty", "no micro-batches"),
    ):
        with pytest.raises(ConfigError, match=line) as refused:
            make_twin(read_run_folder(tmp_path / name))
        assert "\n" not in str(refused.value)
        assert str(tmp_path / name) in str(refused.value)


@pytest.fixture(scope="module")
def real_run() -> Iterator[tuple[RunRecord, dict[str, Any]]]:
    """Serve a run over two stages that are processes, and its config."""
    config = build(
        EngineConfig,
        {
            "model": {"weights": "shipped"},
            "cache": {"num_blocks": 300},
            "parallel": {"pp": 2, "launcher": "ray", "threads": 1},
            "scheduler": {"name": "sarathi", "chunk": 32},
        },
    )
    items = [WorkItem([(7 * n + k) % 250 for k in range(30 + 5 * n)], 12, 0.004 * n) for n in range(24)]
    with LLM.from_config(config, launcher=ProcessLauncher()) as llm:
        for _ in llm.replay(items[:4]):  # to warm up
            pass
        llm.reset()
        for _ in llm.replay(items):
            pass
        yield llm.record, to_mapping(config)


def test_twin_of_a_real_run(tmp_path: Path, real_run: tuple[RunRecord, dict[str, Any]]) -> None:
    record, mapping = real_run
    write_data(tmp_path, record, mapping)
    twin = make_twin(read_run_folder(tmp_path))
    assert twin.learned is not None
    assert twin.setting.plan.num_blocks == record.num_blocks
    assert [len(item.prompt) for item in twin.items] == [30 + 5 * n for n in range(24)]
    replayed = twin.replay()
    Ledger(replayed).check()
    assert [request.output_tokens for request in replayed.requests] == [12] * 24
    assert sum(m.num_tokens for m in replayed.micro_batches) == sum(m.num_tokens for m in record.micro_batches)
    assert abs(twin.error["duration"]) < 0.25  # on a machine that many tests share
    errors = errors_of(twin.replay(0, in_order=True), record)
    assert max(abs(errors[f"busy {stage}"]) for stage in range(2)) < 0.4
    changed = twin.replay(1, twin.changed({"scheduler": "orca_best", "parallel.depth": 3}))
    Ledger(changed).check()
    with pytest.raises(ConfigError, match="learned from a run with pp=2, tp=1"):
        twin.changed({"parallel.pp": 3})
