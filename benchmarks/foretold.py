"""Compares what `gapless explain` foretells of learned stage times with the truth: `python -m benchmarks.foretold`.

Simulated runs of LLaMA 7B and 13B over A100s, with random policies, chunks, grids, layer splits, loads and
disturbances. Each run folder is explained as if it were of a real run, so that its stage times are learned from its
spans. Then the changes that it advises are simulated with the true cost model and other disturbances.

Prints for each metric how many true savings lie within the range that was foretold, of changes whose micro-batches are
of sizes that the run has shown, and of others; 9 of 10 should. Ten minutes of one core, compiled.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from gapless.conf.build import build, load_group, to_mapping
from gapless.conf.schema import SimulateConfig
from gapless.models.tokenizer import ByteTokenizer
from gapless.runtime.core.run_record import RunRecord
from gapless.runtime.explain.explanation import explain
from gapless.runtime.explain.twin import changed_config
from gapless.runtime.explain.what_if import values_of
from gapless.runtime.ledger.explanation import METRICS
from gapless.runtime.run_folder.read import read_run_folder
from gapless.runtime.run_folder.write import write_run_data
from gapless.runtime.simulation.run import start
from gapless.runtime.simulation.setting import make_setting
from gapless.runtime.workload import make_workload

from .support.results import add_json_option, write_json

GRIDS = ("pp2", "pp2", "tp2_pp2", "tp2_pp4")
POLICIES = ("sarathi", "sarathi", "token_budget", "equal_time", "orca_best", "prefill_first", "token_throttle")
LAYERS = {"llama-7b": 32, "llama-13b": 40}
VOCABULARY, CONTEXT = 32_000, 2048
NOT_SHOWN = 0.05  # share of compute time in sizes that a run has not shown from which on a change counts as such


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=25.0, help="of each explanation")
    add_json_option(parser)
    arguments = parser.parse_args()
    chosen = random.Random(arguments.seed)
    found = [row for number in range(arguments.runs) for row in foretold(draw(chosen, number), arguments.seconds)]
    rows = []
    print("savings              sizes        changes  within   median width  median error")
    for metric in METRICS:
        for shown in (True, False):
            of = [row for row in found if row["metric"] == metric and row["shown"] == shown]
            if of:
                rows.append(_summary(metric, shown, of))
    write_json(arguments.json, "foretold", {"savings": rows})
    return 0


def draw(chosen: random.Random, number: int) -> SimulateConfig:
    """Draw the config of a run."""
    model, policy = chosen.choice(list(LAYERS)), load_group("scheduler", chosen.choice(POLICIES))
    grid = load_group("parallel", chosen.choice(GRIDS))
    for key in {"chunk", "budget"} & policy.keys():
        policy[key] = chosen.choice([32, 64, 128, 256, 512])
    if chosen.random() < 0.3:
        layers, moved = [LAYERS[model] // grid["pp"]] * grid["pp"], chosen.choice([2, 4])
        grid["layers"] = [layers[0] + moved, *layers[1:-1], layers[-1] - moved]
    workload = {
        "num_prompts": chosen.choice([30, 60, 120]), "min_len": 100, "max_len": 1500, "seed": number,
        "pd_ratio": chosen.choice([2.0, 5.0, 10.0, 20.0]), "request_rate": chosen.choice([None, None, 3.0, 6.0]),
    }  # fmt: skip
    return build(SimulateConfig, {
        "model": load_group("model", model), "hardware": load_group("hardware", "a100-80g"), "parallel": grid,
        "scheduler": policy, "workload": load_group("workload", "zipf") | workload,
        "simulation": {"jitter": chosen.choice([0.02, 0.05, 0.1]), "straggler_rate": chosen.choice([0.0, 0.01])},
    })  # fmt: skip


def foretold(config: SimulateConfig, seconds: float) -> list[dict[str, Any]]:
    """Explain a run as if it were real, and return of each change and metric what was foretold and what is true."""
    record = _simulated(config, 1)
    with tempfile.TemporaryDirectory() as folder:
        known = {key: value for key, value in to_mapping(config).items() if key != "simulation"}
        write_run_data(Path(folder), record, config=known)
        explanation = explain(read_run_folder(Path(folder)), seconds=seconds)
    rows, before = [], values_of(record)
    for outcome in explanation.outcomes:
        values = {key: yaml.safe_load(text) for key, text in (each.split("=", 1) for each in outcome.overrides)}
        after = values_of(_simulated(changed_config(config, values), 2))
        for metric, saves in outcome.saves.items():
            true = 1 - after[metric] / before[metric] if before[metric] else 0.0
            rows.append({
                "metric": metric, "shown": outcome.beyond <= NOT_SHOWN, "true": true, "error": abs(true - saves.middle),
                "within": saves.low <= true <= saves.high, "width": saves.high - saves.low,
            })  # fmt: skip
    return rows


def _simulated(config: SimulateConfig, repeat: int) -> RunRecord:
    workload = make_workload(
        config.workload, vocab_size=VOCABULARY, context=CONTEXT, tokenizer=ByteTokenizer(VOCABULARY)
    )  # fmt: skip
    (replica,), ends = start(make_setting(config), workload, repeat=repeat)
    for _ in ends:
        pass
    return replica.record


def _summary(metric: str, shown: bool, of: list[dict[str, Any]]) -> dict[str, Any]:
    row = {
        "metric": metric, "sizes": "shown" if shown else "not shown", "changes": len(of),
        "within_share": statistics.fmean(each["within"] for each in of),
        "median_width_share": statistics.median(each["width"] for each in of),
        "median_error_share": statistics.median(each["error"] for each in of),
    }  # fmt: skip
    print(
        f"  {metric:<18} {row['sizes']:<12} {len(of):7} {row['within_share']:7.1%} "
        f"{row['median_width_share']:13.1%} {row['median_error_share']:13.1%}"
    )
    return row


if __name__ == "__main__":
    sys.exit(main())
