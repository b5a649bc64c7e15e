"""Simulated runs in their folders, and twins of them whose stage times are learned."""

from __future__ import annotations

from pathlib import Path

from gapless.conf.build import build, load_group, to_mapping
from gapless.conf.schema import SimulateConfig
from gapless.models.tokenizer import ByteTokenizer
from gapless.runtime.analysis.explain.learned_run import learn_run
from gapless.runtime.analysis.explain.requests_of_record import requests_of
from gapless.runtime.analysis.explain.twin import Twin, values_of
from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.analysis.run_folder.read import RunFolder, read_run_folder
from gapless.runtime.core.run_record import RunRecord
from gapless.runtime.simulation.pipeline.run import simulated
from gapless.runtime.simulation.pipeline.setting import make_setting
from gapless.runtime.simulation.workload import Workload
from gapless.runtime.simulation.workload.make import make_workload
from tests.support.written_runs import write_data


def simulated_config(policy: str = "sarathi", **workload: object) -> SimulateConfig:
    """Return the config of 60 requests of 100 to 800 tokens through LLaMA 7B on two A100s."""
    return build(
        SimulateConfig,
        {
            "model": load_group("model", "llama-7b"),
            "hardware": load_group("hardware", "a100-80g"),
            "parallel": load_group("parallel", "pp2"),
            "scheduler": load_group("scheduler", policy),
            "workload": load_group("workload", "zipf") | {"num_prompts": 60, "min_len": 100, "max_len": 800} | workload,
        },
    )


def workload_of(config: SimulateConfig) -> Workload:
    return make_workload(config.workload, vocab_size=32000, context=2048, tokenizer=ByteTokenizer(32000))


def run(config: SimulateConfig) -> RunRecord:
    return runs(config)[0]


def runs(config: SimulateConfig) -> list[RunRecord]:
    """Return the records of all replicas."""
    return [replica.record for replica in simulated(make_setting(config), workload_of(config))]


def written(path: Path, record: RunRecord, config: SimulateConfig) -> RunFolder:
    write_data(path, record, to_mapping(config))
    return read_run_folder(path)


def learned_twin(config: SimulateConfig) -> Twin:
    """Return the twin of a simulated run as if its cost model were not known."""
    record = run(config)
    learned = learn_run(config, record)
    items, notes = requests_of(record, config.workload, config.block_size)
    return Twin(learned.setting(config), items, config.workload, record, Ledger(record), notes, learned)


def errors_of(replayed: RunRecord, real: RunRecord) -> dict[str, float]:
    """Return by metric, and for the compute of each stage, how far a replay is off: replayed / real - 1."""
    ours, its = ({**values_of(record), **_busy(record)} for record in (replayed, real))
    return {name: ours[name] / value - 1 if value else 0.0 for name, value in its.items()}


def _busy(record: RunRecord) -> dict[str, float]:
    ledger = Ledger(record)
    return {f"busy {stage}": ledger.busy_seconds(stage) for stage in range(ledger.num_stages)}
