"""How near the simulated twin of a real run comes: `python -m benchmarks.fidelity`, or `make fidelity`.

A LLaMA of about 160M parameters with random weights over two pipeline stages of one thread each; three policies by
turns on two workloads. In each round the machine is profiled (`gapless profile`), then each policy runs once for real
on each workload (`gapless bench`), then the profile is measured as often again, and each run is simulated with it
(`gapless simulate`): so a machine that is faster in one round than in another is so for both. Medians over the rounds
count. Nothing of the simulation is fitted to the runs.

What a twin is off by has two sources, which the last table tells apart: stage times that the profile foretells badly,
and all else that a simulation may have wrong, sends, control and the order of things. There each real run is simulated
once more with its own stage times, step by step.

Further arguments are overrides of `gapless bench` and `gapless simulate`. About 15 minutes on 2 cores that do
nothing else.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gapless.conf.build import build
from gapless.conf.schema import SimulateConfig
from gapless.launch.cli import main as gapless
from gapless.launch.turns import requests
from gapless.runtime.cost.stage_costs import Load, StageCosts
from gapless.runtime.ledger import CAUSES, Ledger
from gapless.runtime.run_folder import RunFolder, read_run_folder
from gapless.runtime.simulation import make_replicas, run_fleet, without_prompts
from gapless.runtime.spans import RunRecord

POLICIES = ("orca_best", "sarathi", "equal_time")
MACHINE = ("model=llama-160m", "hardware=cpu", "parallel=pp2", "parallel.threads=1")
SETTING = (
    *MACHINE,
    "cache.num_blocks=512",
    f"scheduler={','.join(POLICIES)}",
    "scheduler.batch=4",
    "scheduler.chunk=64",
)
WORKLOADS = {
    "fixed": ("workload=fixed", "workload.input_len=400", "workload.output_len=40", "workload.num_prompts=12"),
    "zipf": ("workload=zipf", "workload.theta=0.4", "workload.min_len=256", "workload.max_len=768",
             "workload.pd_ratio=10", "workload.num_prompts=12"),
}  # fmt: skip
SAMPLES = 2  # of each micro-batch of a profile, before the runs and after them


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
        runs = {name: [*SETTING, *workload, *overrides] for name, workload in WORKLOADS.items()}
        commands = [_profile(out, number, SAMPLES)]
        commands += [["bench", *run, f"hydra.run.dir={out}/real_{name}_{number}"] for name, run in runs.items()]
        commands += [_profile(out, number, 2 * SAMPLES)]
        if arguments.report:
            commands = []
        for name, run in runs.items():
            twin = out / f"twin_{name}_{number}"
            shutil.rmtree(twin, ignore_errors=True)
            commands.append(["simulate", *run, f"simulation.profile={out}/profile_{number}", f"hydra.run.dir={twin}"])
        for command in commands:
            if code := gapless(command):
                return code
    report(out, arguments.rounds)
    return 0


def _profile(out: Path, number: int, samples: int) -> list[str]:
    grid = ("max_tokens=768", "max_context=1024", "max_decodes=8", f"samples={samples}")
    return ["profile", *MACHINE, *grid, f"hydra.run.dir={out}/profile_{number}"]


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
                (path,) = out.glob(f"real_{workload}_{number}/*_{policy}")
                (twin_path,) = out.glob(f"twin_{workload}_{number}/*_{policy}")
                folder = read_run_folder(path)
                real.append(Figures.of(folder.load()))
                twin.append(Figures.of(read_run_folder(twin_path).load()))
                replayed.append((name, real[-1], *with_own_times(folder, out / f"profile_{number}")))
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
    for _ in run_fleet([replica], without_prompts(requests(config)[0])):
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
