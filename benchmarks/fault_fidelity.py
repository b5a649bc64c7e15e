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

import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gapless import LLM
from gapless.conf.schema import BenchConfig
from gapless.conf.simulation import FaultsConfig
from gapless.launch.compose import compose_one
from gapless.launch.turns import requests
from gapless.runtime.core.run_record import RunRecord
from gapless.runtime.ledger.ledger import Ledger
from gapless.runtime.ledger.recovery import down_seconds, replay_seconds
from gapless.runtime.simulation.faults import draw_faults

from .fidelity import FIXED, SETTING, profile
from .support.faults import kill, stop
from .support.harness import Benchmark, medians, say, words
from .support.simulated import configure, replicas_of

WORKLOAD = f"{FIXED} scheduler=sarathi scheduler.chunk=64"
FAIL_AT_S = 8.0
KINDS = {"no fault": 0, "killed": 0, "hangs": 0, "killed, with a spare": 1}  # spares
HANGS = {"hangs": 1.0}
PARTS = ("detect", "stop", "start", "rendezvous", "weights")
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
    bench = Benchmark(__doc__, rounds=3, out=Path("runs/fault_fidelity"), overrides=True)
    given = bench.given
    if given.rounds < 2:
        bench.parser.error("--rounds: must be 2 or more, since a twin has the repair times of the other rounds")
    shutil.rmtree(given.out, ignore_errors=True)
    runs: list[Run] = []
    for number in range(1, given.rounds + 1):
        profile(given.out, number)
        runs += measure(number, given.overrides)
    report(bench, runs)
    return bench.end()


def measure(number: int, overrides: Sequence[str]) -> list[Run]:
    """Run one round of all kinds."""
    runs = []
    for spares in sorted(set(KINDS.values())):
        config = compose_one(words(SETTING, WORKLOAD, f"parallel.spares={spares}", *overrides), BenchConfig, "bench")
        workload, _ = requests(config)
        with LLM.from_config(config) as llm:
            for _ in llm.replay(list(workload)[:2]):  # no measured run pays for first use
                pass
            for kind in (kind for kind, needs in KINDS.items() if needs == spares):
                say(f"round {number}: {kind}")
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
    keys = [f"simulation.profile={out} seed={run.seed} parallel.spares={KINDS[run.kind]}"]
    if run.kind != "no fault":
        part = medians([other.parts for other in others], *PARTS)
        detect, start = (
            ("hang" if run.kind in HANGS else "process"),
            ("start_with_spare" if KINDS[run.kind] else "start"),
        )
        times = {f"detect_{detect}_s": part["detect"], f"{start}_s": part["start"]}
        times |= {f"{name}_s": part[name] for name in ("stop", "rendezvous", "weights")}
        times |= {"hang_share": HANGS.get(run.kind, 0.0)}
        keys += [f"simulation.faults.{key}={value}" for key, value in times.items()]
        keys.append(f"simulation.faults.at=[{run.failed_at}]")
    (replica,) = replicas_of(configure(SETTING, WORKLOAD, *overrides, *keys))
    return Run.of(run.kind, run.seed, replica.record)


def report(bench: Benchmark, runs: Sequence[Run]) -> None:
    twins = [
        twin_of(
            run,
            [other for other in runs if other.kind == run.kind and other.seed != run.seed],
            bench.given.out,
            bench.given.overrides,
        )
        for run in runs
    ]
    quiet = [statistics.median(each.makespan for each in of if each.kind == "no fault") for of in (runs, twins)]
    for kind in KINDS:
        for name in FIGURES[:1] if kind == "no fault" else FIGURES:
            real, twin = (
                [each.makespan - start if name == "longer" else getattr(each, name) for each in of if each.kind == kind]
                for of, start in zip((runs, twins), quiet, strict=True)
            )
            middle, of_twin = statistics.median(real), statistics.median(twin)
            seconds = {"real_s": middle, "least_s": min(real), "most_s": max(real), "twin_s": of_twin}
            bench.row("figures", kind=kind, figure=name, **seconds, off_share=of_twin / middle - 1)
    for kind in list(KINDS)[1:]:
        part = medians([run.parts for run in runs if run.kind == kind], *PARTS)
        bench.row("parts", kind=kind, **{f"{name}_s": value for name, value in part.items()})


if __name__ == "__main__":
    sys.exit(main())
