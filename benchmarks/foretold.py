"""Compares savings predicted from learned stage times with the true cost model: `python -m benchmarks.foretold`.

Simulated runs of LLaMA 7B and 13B over A100s, with random policies, chunks, grids, layer splits, loads and noise. Each
run folder is explained as if it were a real run, so stage times are learned from its spans. Then the suggested changes
are simulated with the true cost model and other noise.

Prints for each metric how many true savings are within the predicted range, separately for changes whose micro-batch
sizes occurred in the run and for others; the target is 90%. Ten minutes of one core, compiled.
"""

from __future__ import annotations

import random
import statistics
import sys

import yaml

from gapless.conf.build import build, load_group, to_mapping
from gapless.conf.schema import SimulateConfig
from gapless.models.tokenizer import ByteTokenizer
from gapless.runtime.analysis.explain.analysed_run import AnalysedRun
from gapless.runtime.analysis.explain.explain_run import explain
from gapless.runtime.analysis.explain.explanation import METRICS
from gapless.runtime.analysis.explain.twin import changed_config, make_twin, values_of
from gapless.runtime.analysis.run_folder.read import read_run_folder
from gapless.runtime.analysis.run_folder.run_info import RunInfo
from gapless.runtime.analysis.run_folder.write import write_run_data
from gapless.runtime.core.run_record import RunRecord
from gapless.runtime.simulation.pipeline.run import start
from gapless.runtime.simulation.pipeline.setting import make_setting
from gapless.runtime.simulation.workload import make_workload

from .support.harness import Benchmark, Row, scratch

GRIDS = ("pp2", "pp2", "tp2_pp2", "tp2_pp4")
POLICIES = ("sarathi", "sarathi", "token_budget", "equal_time", "orca_best", "prefill_first", "token_throttle")
LAYERS = {"llama-7b": 32, "llama-13b": 40}
VOCABULARY, CONTEXT = 32_000, 2048
NOT_SHOWN = 0.05  # more compute time than this share in unseen sizes makes a change "not shown"


def main() -> int:
    bench = Benchmark(__doc__, runs=60, seed=0, seconds=25.0)
    chosen = random.Random(bench.given.seed)
    found = [row for n in range(bench.given.runs) for row in foretold(draw(chosen, n), bench.given.seconds)]
    for metric in METRICS:
        for shown in (True, False):
            if of := [row for row in found if (row["metric"], row["shown"]) == (metric, shown)]:
                bench.row(
                    "savings",
                    metric=metric,
                    sizes="shown" if shown else "not shown",
                    changes=len(of),
                    within_share=statistics.fmean(each["within"] for each in of),
                    median_width_share=statistics.median(each["width"] for each in of),
                    median_error_share=statistics.median(each["error"] for each in of),
                )
    return bench.end()


def draw(chosen: random.Random, number: int) -> SimulateConfig:
    """Draw a random config of a run."""
    model, policy = chosen.choice(list(LAYERS)), load_group("scheduler", chosen.choice(POLICIES))
    grid = load_group("parallel", chosen.choice(GRIDS))
    for key in {"chunk", "max_batched_tokens"} & policy.keys():
        policy[key] = chosen.choice([32, 64, 128, 256, 512])
    if chosen.random() < 0.3:
        layers, moved = [LAYERS[model] // grid["pp"]] * grid["pp"], chosen.choice([2, 4])
        grid["layers"] = [layers[0] + moved, *layers[1:-1], layers[-1] - moved]
    workload = {
        "num_prompts": chosen.choice([30, 60, 120]),
        "min_len": 100,
        "max_len": 1500,
        "seed": number,
        "pd_ratio": chosen.choice([2.0, 5.0, 10.0, 20.0]),
        "request_rate": chosen.choice([None, None, 3.0, 6.0]),
    }
    return build(
        SimulateConfig,
        {
            "model": load_group("model", model),
            "hardware": load_group("hardware", "a100-80g"),
            "parallel": grid,
            "scheduler": policy,
            "workload": load_group("workload", "zipf") | workload,
            "simulation": {"jitter": chosen.choice([0.02, 0.05, 0.1]), "straggler_rate": chosen.choice([0.0, 0.01])},
        },
    )


def foretold(config: SimulateConfig, seconds: float) -> list[Row]:
    """Explain a run as if it were real; return predicted and true savings for each change and metric."""
    record = _simulated(config, 1)
    with scratch() as folder:
        known = {key: value for key, value in to_mapping(config).items() if key != "simulation"}
        run = AnalysedRun.of(record, RunInfo(known))
        write_run_data(folder, run.summary, run.record, run.ledger, run.blame)
        explanation = explain(make_twin(read_run_folder(folder)), seconds=seconds)
    rows, before = [], values_of(record)
    for outcome in explanation.outcomes:
        values = {key: yaml.safe_load(text) for key, text in (each.split("=", 1) for each in outcome.overrides)}
        after = values_of(_simulated(changed_config(config, values), 2))
        shown = outcome.beyond <= NOT_SHOWN
        for metric, saves in outcome.saves.items():
            true = 1 - after[metric] / before[metric] if before[metric] else 0.0
            row = {"metric": metric, "shown": shown, "error": abs(true - saves.middle)}
            rows.append(row | {"within": saves.low <= true <= saves.high, "width": saves.high - saves.low})
    return rows


def _simulated(config: SimulateConfig, repeat: int) -> RunRecord:
    workload = make_workload(
        config.workload, vocab_size=VOCABULARY, context=CONTEXT, tokenizer=ByteTokenizer(VOCABULARY)
    )
    (replica,), ends = start(make_setting(config), workload, repeat=repeat)
    for _ in ends:
        pass
    return replica.record


if __name__ == "__main__":
    sys.exit(main())
