"""Compares faults of real runs with simulated ones: `python -m benchmarks.fault_fidelity`.

A LLaMA of about 160M parameters with random weights serves one workload over two pipeline stages of one thread each.
In each round it runs without a fault, with a rank killed (`kill -9`), with a rank that hangs (SIGSTOP), and with a rank
killed while a spare stands by. Before that the machine's operators are profiled, as in `benchmarks.fidelity`; all
rounds measure into one profile.

Each run with a fault then has a simulated twin: the same rank fails at the same time (`simulation.faults.at`), and the
parts of the repair are the medians of the other rounds' repairs of that kind, as an operator would put in those of the
own cluster. `down` is the time from the fault until the stages stood again, `replay` that in which tokens were computed
again, and `longer` what the fault added to the run, beside the median of the runs without one.

Further arguments are overrides of `gapless bench` and `gapless simulate`. About five minutes a round on 2 cores that do
nothing else.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from gapless.conf.profiling import ProfileConfig
from gapless.conf.schema import BenchConfig, SimulateConfig
from gapless.conf.simulation import FaultsConfig
from gapless.launch.cli import main as gapless
from gapless.launch.compose import compose_one
from gapless.launch.profile import measure_pipeline
from gapless.launch.turns import requests
from gapless.runtime import LLM
from gapless.runtime.core.run_record import RunRecord
from gapless.runtime.cost.profile_folder import ProfileFolder
from gapless.runtime.ledger.ledger import Ledger
from gapless.runtime.ledger.recovery import down_seconds, replay_seconds
from gapless.runtime.profiling.profile_plan import plan_profile
from gapless.runtime.simulation.faults import draw_faults
from gapless.runtime.simulation.run import simulated
from gapless.runtime.simulation.setting import make_setting

from .fidelity import GRID, MACHINE, PIPELINE_SAMPLES, SETTING
from .support.faults import kill, stop
from .support.results import add_json_option, write_json

WORKLOAD = ("workload=fixed", "workload.input_len=400", "workload.output_len=40", "workload.num_prompts=12",
            "scheduler=sarathi", "scheduler.chunk=64")  # fmt: skip
FAIL_AT_S = 8.0
KINDS = {"no fault": 0, "killed": 0, "hangs": 0, "killed, with a spare": 1}  # spares
HANGS = {"hangs": 1.0}
PARTS = {"detect": "", "stop": "stop_s", "start": "start_s", "rendezvous": "rendezvous_s", "weights": "weights_s"}
FIGURES = ("makespan", "down", "replay", "longer")


@dataclass(frozen=True, slots=True)
class Run:
    """One run's figures in seconds, and the parts of its repair."""

    kind: str
    seed: int
    failed_at: float
    makespan: float
    down: float
    replay: float
    parts: dict[str, float]

    @classmethod
    def of(cls, kind: str, seed: int, record: RunRecord) -> Run:
        ledger = Ledger(record)
        ledger.check()
        faults = record.faults
        assert len(faults) == (kind != "no fault"), faults
        parts = {"detect": faults[0].detected - faults[0].since, **faults[0].parts} if faults else {}
        failed_at = faults[0].since - ledger.t0 if faults else 0.0
        down, replay = down_seconds(faults, ledger.t1), sum(replay_seconds(record))
        return cls(kind, seed, failed_at, ledger.span_seconds, down, replay, parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/fault_fidelity"))
    add_json_option(parser)
    arguments, overrides = parser.parse_known_args()
    if arguments.rounds < 2:
        parser.error("--rounds: must be 2 or more, since a twin has the repair times of the other rounds")
    shutil.rmtree(arguments.out, ignore_errors=True)
    runs: list[Run] = []
    for number in range(1, arguments.rounds + 1):
        profile(arguments.out, number)
        runs += measure(number, overrides)
    return report(arguments.out, runs, overrides, arguments.json)


def profile(out: Path, number: int) -> None:
    words = [*MACHINE, *GRID, f"hydra.run.dir={out}"]
    if code := gapless(["profile", *words, f"samples={number}", "pipeline=false"]):
        sys.exit(code)
    plan = plan_profile(compose_one(words, ProfileConfig, "profile"))
    measure_pipeline(plan, ProfileFolder(out), number * PIPELINE_SAMPLES, Console(stderr=True, highlight=False))


def measure(number: int, overrides: Sequence[str]) -> list[Run]:
    """Run one round of all kinds."""
    runs = []
    for spares in sorted(set(KINDS.values())):
        words = [*SETTING, *WORKLOAD, f"parallel.spares={spares}", *overrides]
        config = compose_one(words, BenchConfig, "bench")
        workload, _ = requests(config)
        with LLM.from_config(config) as llm:
            for _ in llm.replay(list(workload)[:2]):  # no measured run pays for first use
                pass
            for kind in (kind for kind, needs in KINDS.items() if needs == spares):
                print(f"round {number}: {kind}", file=sys.stderr, flush=True)
                llm.reset()
                runs.append(Run.of(kind, number, with_fault(llm, workload, kind, number)))
    return runs


def with_fault(llm: LLM, workload: Any, kind: str, seed: int) -> RunRecord:
    """Serve the workload; the rank that the simulation draws by `seed` fails after `FAIL_AT_S`."""
    ranks = [int(where.split("pid ")[1].split()[0]) for where in llm.where]
    fault = next(draw_faults(FaultsConfig(at=(FAIL_AT_S,)), len(ranks), seed=seed))
    begun, is_due = time.monotonic(), kind != "no fault"
    for _ in llm.replay(workload):
        if is_due and time.monotonic() > begun + fault.at:
            (stop if kind in HANGS else kill)(ranks[fault.rank])
            is_due = False
    return llm.record


def twin_of(run: Run, others: Sequence[Run], out: Path, overrides: Sequence[str]) -> Run:
    """Simulate a run with its fault at its time, and the median repair of the `others`."""
    words = [*SETTING, *WORKLOAD, *overrides, f"simulation.profile={out}", f"seed={run.seed}"]
    if run.kind != "no fault":
        part = {name: statistics.median(other.parts[name] for other in others) for name in PARTS}
        spares = KINDS[run.kind]
        detect, start = ("hang" if run.kind in HANGS else "process"), ("start_with_spare_s" if spares else "start_s")
        times = {f"detect_{detect}_s": part["detect"], "stop_s": part["stop"], start: part["start"],
                 "rendezvous_s": part["rendezvous"], "weights_s": part["weights"],
                 "hang_share": HANGS.get(run.kind, 0.0)}  # fmt: skip
        words += [f"simulation.faults.{key}={value}" for key, value in times.items()]
        words += [f"simulation.faults.at=[{run.failed_at}]", f"parallel.spares={spares}"]
    config = compose_one(words, SimulateConfig, "simulate")
    (replica,) = simulated(make_setting(config), requests(config)[0])
    return Run.of(run.kind, run.seed, replica.record)


def report(out: Path, runs: Sequence[Run], overrides: Sequence[str], json_file: Path | None) -> int:
    twins = [
        twin_of(run, [o for o in runs if o.kind == run.kind and o.seed != run.seed], out, overrides) for run in runs
    ]
    quiet = [statistics.median(each.makespan for each in of if each.kind == "no fault") for of in (runs, twins)]
    rows = []
    print(f"\n{'seconds, medians':24}{'':10}{'real':>8}{'least':>8}{'most':>8}{'twin':>8}{'off':>8}")
    for kind in KINDS:
        for name in FIGURES[:1] if kind == "no fault" else FIGURES:
            real, twin = (
                [each.makespan - start if name == "longer" else getattr(each, name) for each in of if each.kind == kind]
                for of, start in zip((runs, twins), quiet, strict=True)
            )
            row = {
                "kind": kind, "figure": name, "real_s": statistics.median(real), "least_s": min(real),
                "most_s": max(real), "twin_s": statistics.median(twin),
            }  # fmt: skip
            row["off_share"] = row["twin_s"] / row["real_s"] - 1
            rows.append(row)
            print(f"{kind:24}{name:10}" + "".join(f"{row[key]:8.2f}" for key in ("real_s", "least_s", "most_s",
                  "twin_s")) + f"{row['off_share']:8.1%}")  # fmt: skip
    parts = [
        {"kind": kind} | {f"{name}_s": statistics.median(run.parts[name] for run in runs if run.kind == kind)
                          for name in PARTS}
        for kind in list(KINDS)[1:]
    ]  # fmt: skip
    print(f"\n{'parts of real repairs':34}" + "".join(f"{name:>12}" for name in PARTS))
    for row in parts:
        print(f"{row['kind']:34}" + "".join(f"{row[f'{name}_s']:12.3f}" for name in PARTS))
    write_json(json_file, Path(__file__).stem, {"figures": rows, "parts": parts})
    return 0


if __name__ == "__main__":
    sys.exit(main())
