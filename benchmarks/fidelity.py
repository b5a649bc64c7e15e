"""How near the simulated twin of a real run comes: `python -m benchmarks.fidelity`, or `make fidelity`.

A LLaMA of about 160M parameters with random weights over two pipeline stages of one thread each; three policies on two
workloads. In each round the machine's operators are profiled (`gapless profile`), then each policy runs once for real
on each workload (`gapless bench`). Before and after each run the profile's whole steps go through the real pipeline,
which tell how fast the machine is at that time: on a shared one that changes by the minute. Each run is then simulated
(`gapless simulate`) by the round's operators and the steps around that run. Medians over the rounds count. Nothing of
the simulation is fitted to the runs.

What a twin is off by has two sources, which the last table tells apart: stage times that the profile foretells badly,
and all else that a simulation may have wrong, sends, control and the order of things. There each real run is simulated
once more with its own stage times, step by step.

Further arguments are overrides of `gapless bench` and `gapless simulate`. About 25 minutes on 2 cores that do
nothing else.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from gapless.conf.build import build
from gapless.conf.profiling import ProfileConfig
from gapless.conf.schema import SimulateConfig
from gapless.launch.cli import main as gapless
from gapless.launch.compose import compose_one
from gapless.launch.profile import measure_pipeline
from gapless.launch.turns import requests
from gapless.runtime.cost.stage_costs import Load, StageCosts
from gapless.runtime.ledger import CAUSES, Ledger
from gapless.runtime.profiling.folder import ProfileFolder, StageSample
from gapless.runtime.profiling.plan import plan_profile
from gapless.runtime.run_folder import RunFolder, read_run_folder
from gapless.runtime.simulation import make_replicas, run_fleet
from gapless.runtime.spans import RunRecord

POLICIES = {
    "orca_best": ("scheduler=orca_best",),
    "sarathi": ("scheduler=sarathi", "scheduler.chunk=64"),
    "equal_time": ("scheduler=equal_time", "scheduler.chunk=64"),
}
MACHINE = ("model=llama-160m", "hardware=cpu", "parallel=pp2", "parallel.threads=1")
SETTING = (*MACHINE, "cache.num_blocks=512", "scheduler.batch=4")
GRID = ("max_tokens=768", "max_context=1024", "max_decodes=8")
WORKLOADS = {
    "fixed": ("workload=fixed", "workload.input_len=400", "workload.output_len=40", "workload.num_prompts=12"),
    "zipf": ("workload=zipf", "workload.theta=0.4", "workload.min_len=256", "workload.max_len=768",
             "workload.pd_ratio=10", "workload.num_prompts=12"),
}  # fmt: skip
SAMPLES = 2  # of each micro-batch of a profile, and of each step before a run and after it


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/fidelity"))
    parser.add_argument("--report", action="store_true", help="only simulate again and compare, from what is in --out")
    arguments, overrides = parser.parse_known_args()
    out: Path = arguments.out
    if not arguments.report:
        shutil.rmtree(out, ignore_errors=True)
    for number in range(1, arguments.rounds + 1):
        runs = {
            Run(name, policy, number): [*SETTING, *keys, *workload, *overrides]
            for name, workload in WORKLOADS.items()
            for policy, keys in POLICIES.items()
        }
        if not arguments.report:
            measure(out, number, runs)
        for run, setting in runs.items():
            shutil.rmtree(run.twin(out), ignore_errors=True)
            _gapless("simulate", *setting, f"simulation.profile={run.profile(out)}", f"hydra.run.dir={run.twin(out)}")
    report(out, arguments.rounds)
    return 0


class Run(NamedTuple):
    """One real run, and the folders of what belongs to it."""

    workload: str
    policy: str
    round: int

    def __str__(self) -> str:
        return f"{self.workload}_{self.policy}_{self.round}"

    def real(self, out: Path) -> Path:
        return out / f"real_{self}"

    def twin(self, out: Path) -> Path:
        return out / f"twin_{self}"

    def profile(self, out: Path) -> Path:
        """The round's operators, the steps through the pipeline around this run."""
        return out / f"profile_{self}"


def measure(out: Path, number: int, runs: Mapping[Run, Sequence[str]]) -> None:
    """A round: operators, then steps through the pipeline and real runs by turns."""
    operators = out / f"operators_{number}"
    profile = [*MACHINE, *GRID, f"samples={SAMPLES}", f"hydra.run.dir={operators}"]
    _gapless("profile", *profile, "pipeline=false")
    plan = plan_profile(compose_one(profile, ProfileConfig, "profile"))

    def steps(name: str) -> list[StageSample]:
        folder = ProfileFolder(out / f"steps_{name}")
        folder.begin(plan.about, {})
        measure_pipeline(plan, folder, SAMPLES, Console(stderr=True, highlight=False))
        return folder.stages()

    before = steps(f"before_{number}")
    for run, setting in runs.items():
        _gapless("bench", *setting, f"hydra.run.dir={run.real(out)}")
        after = steps(f"after_{run}")
        shutil.copytree(operators, run.profile(out))
        ProfileFolder(run.profile(out)).add_stages([*before, *after])
        before = after


def _gapless(*command: str) -> None:
    if code := gapless(command):
        sys.exit(code)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run, seconds: its makespan, each stage's busy time, idle time by cause summed over the stages."""

    makespan: float
    busy: list[float]
    causes: dict[str, float]

    @classmethod
    def of(cls, record: RunRecord) -> Figures:
        ledger = Ledger(record)
        busy = [ledger.busy_seconds(stage) for stage in range(ledger.num_stages)]
        causes = {str(cause): seconds for cause, seconds in ledger.seconds_by_cause().items()}
        return cls(ledger.span_seconds, busy, causes)


def report(out: Path, rounds: int) -> None:
    """Real beside simulated, by workload and policy, then whether what is asked is met."""
    worst = {"makespan": 0.0, "busy": 0.0, "cause": 0.0}
    replayed: list[tuple[str, Figures, Figures, float]] = []

    def row(name: str, real: list[float], twin: list[float], over: list[float] | None = None) -> float:
        """Prints it; the median of twin over real less 1, or of their difference over `over`."""
        whole = over or real
        off = [(b - a) / c for a, b, c in zip(real, twin, whole, strict=True)]
        middle = statistics.median(off)
        spread = f"[{min(off):+.1%} .. {max(off):+.1%}]"
        seconds = f"{statistics.median(real):9.2f} {statistics.median(twin):10.2f}"
        print(f"  {name:<22}{seconds}   {middle:+7.1%}{' of span' if over else ' ' * 8} {spread}")
        return middle

    for workload in WORKLOADS:
        for policy in POLICIES:
            name = f"{workload}, {policy}"
            real, twin = [], []
            for number in range(1, rounds + 1):
                run = Run(workload, policy, number)
                folder = read_run_folder(run.real(out))
                real.append(Figures.of(folder.load()))
                twin.append(Figures.of(read_run_folder(run.twin(out)).load()))
                replayed.append((name, real[-1], *with_own_times(folder, run.profile(out))))
            print(f"\n{name}: medians of {rounds} rounds, the twin's difference [least .. most]")
            print(f"  {'':<22}{'real s':>9} {'twin s':>10}")
            spans = [run.makespan for run in real]
            off = row("makespan", spans, [run.makespan for run in twin])
            worst["makespan"] = max(worst["makespan"], abs(off))
            for stage in range(len(real[0].busy)):
                off = row(f"busy, stage {stage}", [run.busy[stage] for run in real], [run.busy[stage] for run in twin])
                worst["busy"] = max(worst["busy"], abs(off))
            for cause in map(str, CAUSES):
                a, b = [run.causes[cause] for run in real], [run.causes[cause] for run in twin]
                if max(*a, *b) > 0.002 * min(spans):
                    worst["cause"] = max(worst["cause"], abs(row(cause, a, b, spans)))
    print("\nasked of the medians")
    for what, key, most in (
        ("makespan, twin over real", "makespan", 0.05),
        ("busy time of each stage, twin over real", "busy", 0.05),
        ("idle seconds of each cause, over the run's span", "cause", 0.10),
    ):
        met = "met" if worst[key] <= most else "NOT MET"
        print(f"  {what:<50} off by {worst[key]:.1%} at the most; {most:.0%} is asked: {met}")
    print("\neach run simulated with its own stage times: what is left is not the cost model's")
    print(f"  {'':<22}{'makespan':>10}{'the cause that is off most':>40}{'micro-batches alike':>22}")
    for name, run, again, alike in replayed:
        causes = {cause: (again.causes[cause] - seconds) / run.makespan for cause, seconds in run.causes.items()}
        cause = max(causes, key=lambda cause: abs(causes[cause]))
        most_off = f"{cause} {causes[cause]:+.1%} of span"
        print(f"  {name:<22}{again.makespan / run.makespan:10.3f}{most_off:>40}{alike:>22.0%}")


def with_own_times(folder: RunFolder, profile: Path) -> tuple[Figures, float]:
    """A real run simulated with the stage times that it had; the share of micro-batches that came out the same."""
    mapping = {key: _from_json(folder.config[key]) for key in ("model", "hardware", "parallel", "scheduler", "cache",
                                                              "seed", "workload")}  # fmt: skip
    config = build(SimulateConfig, mapping | {"simulation": {"profile": str(profile)}})
    (replica,) = make_replicas(config)
    own = _OwnTimes(folder.load(), replica.pipeline.costs)
    replica.pipeline.costs = own
    for _ in run_fleet([replica], requests(config)[0].without_prompts()):
        pass
    return Figures.of(replica.record), own.alike / max(own.asked, len(own.steps))


class _OwnTimes(StageCosts):
    """A run's stage times in the order of its micro-batches, then those of a cost model."""

    def __init__(self, record: RunRecord, beyond: StageCosts) -> None:
        super().__init__(beyond.layers, beyond.operators)
        self.asked = self.alike = 0
        self.steps = sorted(record.steps, key=lambda step: step.step)
        self._times: dict[int, list[float]] = {step.step: [0.0] * record.num_stages for step in self.steps}
        for span in record.spans:
            self._times[span.step][span.stage] = span.end - span.begin

    def seconds(self, load: Load) -> list[float]:
        self.asked += 1
        if self.asked > len(self.steps):
            return super().seconds(load)
        step = self.steps[self.asked - 1]
        self.alike += (step.num_tokens, step.decode_context) == (load.rows, load.context)
        return list(self._times[step.step])


def _from_json(value: Any) -> Any:
    """A config's value as JSON has it, which knows no infinity."""
    if isinstance(value, dict):
        return {key: _from_json(below) for key, below in value.items()}
    if isinstance(value, list):
        return [_from_json(below) for below in value]
    return math.inf if value == "inf" else value


if __name__ == "__main__":
    sys.exit(main())
