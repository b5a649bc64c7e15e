"""Compares real runs with their simulated twins: `python -m benchmarks.fidelity`, or `make fidelity`.

A LLaMA of about 160M parameters with random weights serves two workloads under three policies, over two pipeline stages
of one thread each. In each round each policy runs once for real on each workload (`gapless bench`). Before each run the
machine's operators are profiled (`gapless profile`), and whole micro-batches of the profile go through the real
pipeline, each for about as long as the run. All rounds measure into one profile: a shared machine's speed changes from
one second to the next, so profile and runs see the same machine only on average. Each policy is then simulated on each
workload (`gapless simulate`) with that profile. Nothing in the simulation is fitted to the runs.

Beside each difference stands its standard error, which comes from how much the runs, and the micro-batches before them,
differ among themselves. A difference within two standard errors of its bound needs more rounds to decide.

A twin can differ for two reasons: the profile predicts stage times badly, or the simulation gets something else wrong,
such as sends, control or the order of micro-batches. The last table separates them: it simulates each real run once
more with the stage times that the run had.

Further arguments are overrides of `gapless bench` and `gapless simulate`. About ten minutes a round on 2 cores that do
nothing else.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import sys
from collections.abc import Sequence
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
from gapless.runtime.core.run_record import RunRecord
from gapless.runtime.cost.measured import MeasuredOperators, pace
from gapless.runtime.cost.profile_folder import ProfileFolder
from gapless.runtime.cost.stage_costs import MicroBatchShape, StageCosts
from gapless.runtime.ledger.causes import CAUSES
from gapless.runtime.ledger.ledger import Ledger
from gapless.runtime.profiling.profile_plan import plan_profile
from gapless.runtime.run_folder.read import RunFolder, read_run_folder
from gapless.runtime.simulation.replicas import make_replicas, run_fleet
from gapless.runtime.simulation.setting import make_setting

from .support.results import add_json_option, write_json

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
PROFILE = "profile"
PIPELINE_SAMPLES = 3  # passes of each micro-batch through the pipeline before a run, about as long as the run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/fidelity"))
    parser.add_argument("--report", action="store_true", help="only simulate again and compare with the runs in --out")
    add_json_option(parser)
    arguments, overrides = parser.parse_known_args()
    out: Path = arguments.out
    if not arguments.report:
        shutil.rmtree(out, ignore_errors=True)
        for number in range(1, arguments.rounds + 1):
            measure(out, number, overrides)
    for cell in CELLS:
        shutil.rmtree(cell.twin(out), ignore_errors=True)
        _gapless("simulate", *cell.setting, *overrides, f"simulation.profile={out / PROFILE}",
                 f"hydra.run.dir={cell.twin(out)}")  # fmt: skip
    report(out, arguments.rounds, arguments.json)
    return 0


class Cell(NamedTuple):
    """A policy on a workload, and the folders of its runs."""

    workload: str
    policy: str

    def __str__(self) -> str:
        return f"{self.workload}, {self.policy}"

    @property
    def setting(self) -> tuple[str, ...]:
        return *SETTING, *POLICIES[self.policy], *WORKLOADS[self.workload]

    def real(self, out: Path, number: int) -> Path:
        return out / f"real_{self.workload}_{self.policy}_{number}"

    def twin(self, out: Path) -> Path:
        return out / f"twin_{self.workload}_{self.policy}"


CELLS = [Cell(workload, policy) for workload in WORKLOADS for policy in POLICIES]


def measure(out: Path, number: int, overrides: Sequence[str]) -> None:
    """Run one round: by turns profile operators, send micro-batches through the pipeline and run a policy for real."""
    profile = [*MACHINE, *GRID, f"hydra.run.dir={out / PROFILE}"]
    plan = plan_profile(compose_one(profile, ProfileConfig, "profile"))
    for turn, cell in enumerate(CELLS, (number - 1) * len(CELLS) + 1):
        _gapless("profile", *profile, f"samples={turn}", "pipeline=false")
        console = Console(stderr=True, highlight=False)
        measure_pipeline(plan, ProfileFolder(out / PROFILE), turn * PIPELINE_SAMPLES, console)
        _gapless("bench", *cell.setting, *overrides, f"hydra.run.dir={cell.real(out, number)}")


def _gapless(*command: str) -> None:
    if code := gapless(command):
        sys.exit(code)


@dataclass(frozen=True, slots=True)
class Figures:
    """Seconds of one run: its makespan, each stage's busy time, and the idle time of all stages by cause."""

    makespan: float
    busy: list[float]
    causes: dict[str, float]

    @classmethod
    def of(cls, record: RunRecord) -> Figures:
        ledger = Ledger(record)
        busy = [ledger.busy_seconds(stage) for stage in range(ledger.num_stages)]
        causes = {str(cause): seconds for cause, seconds in ledger.seconds_by_cause().items()}
        return cls(ledger.span_seconds, busy, causes)


def report(out: Path, rounds: int, json_file: Path | None) -> None:
    """Print real beside simulated for each workload and policy, then whether each requirement is met."""
    profile = ProfileFolder(out / PROFILE)
    stages, about = profile.stages(), profile.about()
    operators = MeasuredOperators(profile.operators())
    each = len(stages) // (rounds * len(CELLS))  # measurements of one turn
    paces = [pace(operators, about.layers, stages[at : at + each]) for at in range(0, len(stages), each)]
    of_profile = _error(paces) / statistics.mean(paces)
    print(f"\nmicro-batches through the pipeline took {statistics.mean(paces):.3f} times as long as their operators, "
          f"{min(paces):.3f} to {max(paces):.3f} from one turn to the next: +-{of_profile:.1%}")  # fmt: skip
    worst = {"makespan": (0.0, 0.0), "busy": (0.0, 0.0), "cause": (0.0, 0.0)}
    replayed: list[tuple[Cell, Figures, Figures, float]] = []
    tables: dict[str, list[dict[str, Any]]] = {
        "pace": [{
            "mean_ratio": statistics.mean(paces), "least_ratio": min(paces), "most_ratio": max(paces),
            "error_share": of_profile,
        }],
        "twins": [], "requirements": [], "replays": [],
    }  # fmt: skip

    def row(cell: Cell, kind: str, name: str, real: list[float], twin: float, over: float | None = None) -> None:
        """Print and keep the twin minus the runs' median, relative to that median or to `over`, with its error."""
        middle = statistics.median(real)
        off = (twin - middle) / (over or middle)
        error = math.hypot(1.25 * _error(real), of_profile * twin) / (over or middle)  # 1.25: of a median
        spread = f"[{min(real):.2f} .. {max(real):.2f}]"
        print(
            f"  {name:<22}{middle:8.2f} {spread:<18}{twin:8.2f}   {off:+6.1%} +- {error:4.1%}{' of span' * bool(over)}"
        )
        worst[kind] = max(worst[kind], (abs(off), error))
        tables["twins"].append({
            "workload": cell.workload, "policy": cell.policy, "figure": name, "real_median_s": middle,
            "real_least_s": min(real), "real_most_s": max(real), "twin_s": twin, "difference_share": off,
            "error_share": error, "relative_to": "span" if over else "real",
        })  # fmt: skip

    for cell in CELLS:
        twin = Figures.of(read_run_folder(cell.twin(out)).load())
        real = []
        for number in range(1, rounds + 1):
            folder = read_run_folder(cell.real(out, number))
            real.append(Figures.of(folder.load()))
            replayed.append((cell, real[-1], *with_own_times(folder, out / PROFILE)))
        print(f"\n{cell}: median of {rounds} runs, least and most, the twin")
        spans = [run.makespan for run in real]
        row(cell, "makespan", "makespan", spans, twin.makespan)
        for stage, busy in enumerate(twin.busy):
            row(cell, "busy", f"busy, stage {stage}", [run.busy[stage] for run in real], busy)
        for cause in map(str, CAUSES):
            seconds = [run.causes[cause] for run in real]
            if max(*seconds, twin.causes[cause]) > 0.002 * min(spans):
                row(cell, "cause", cause, seconds, twin.causes[cause], statistics.median(spans))
    print("\nrequired of medians")
    for what, key, most in (
        ("makespan, twin over real", "makespan", 0.05),
        ("busy time of each stage, twin over real", "busy", 0.05),
        ("idle seconds of each cause, over the run's span", "cause", 0.10),
    ):
        off, error = worst[key]
        met = "met" if off <= most else "not met" if off - 2 * error > most else "too few rounds to decide"
        print(f"  {what:<50} off by {off:.1%} +- {error:.1%} at the most; {most:.0%} is allowed: {met}")
        tables["requirements"].append({
            "requirement": what, "most_difference_share": off, "error_share": error, "allowed_share": most,
            "verdict": met,
        })  # fmt: skip
    print("\neach run simulated with its own stage times: the cost model has no part in these differences")
    print(f"  {'':<22}{'makespan':>10}{'the cause that is off most':>40}{'micro-batches alike':>22}")
    for cell, run, again, alike in replayed:
        causes = {cause: (again.causes[cause] - seconds) / run.makespan for cause, seconds in run.causes.items()}
        cause = max(causes, key=lambda cause: abs(causes[cause]))
        most_off = f"{cause} {causes[cause]:+.1%} of span"
        print(f"  {cell!s:<22}{again.makespan / run.makespan:10.3f}{most_off:>40}{alike:>22.0%}")
        tables["replays"].append({
            "workload": cell.workload, "policy": cell.policy, "makespan_ratio": again.makespan / run.makespan,
            "cause": cause, "cause_share_of_span": causes[cause], "alike_share": alike,
        })  # fmt: skip
    write_json(json_file, "fidelity", tables)


def _error(samples: Sequence[float]) -> float:
    """The standard error of the mean of `samples`."""
    return statistics.stdev(samples) / math.sqrt(len(samples)) if len(samples) > 1 else math.inf


def with_own_times(folder: RunFolder, profile: Path) -> tuple[Figures, float]:
    """Simulate a real run with the stage times that it had; also return the share of micro-batches that are alike."""
    mapping = {key: _from_json(folder.config[key]) for key in ("model", "hardware", "parallel", "scheduler", "cache",
                                                              "seed", "workload")}  # fmt: skip
    config = build(SimulateConfig, mapping | {"simulation": {"profile": str(profile)}})
    (replica,) = make_replicas(make_setting(config))
    own = _OwnTimes(folder.load(), replica.pipeline.costs)
    replica.pipeline.costs = own
    for _ in run_fleet([replica], requests(config)[0].without_prompts()):
        pass
    return Figures.of(replica.record), own.alike / max(own.asked, len(own.micro_batches))


class _OwnTimes(StageCosts):
    """Gives a real run's stage times in the order of its micro-batches, and those of a cost model after its last."""

    def __init__(self, record: RunRecord, beyond: StageCosts) -> None:
        super().__init__(beyond.layers, beyond.operators)
        self.asked = self.alike = 0
        self.micro_batches = sorted(record.micro_batches, key=lambda micro_batch: micro_batch.micro_batch)
        self._times: dict[int, list[float]] = {m.micro_batch: [0.0] * record.num_stages for m in self.micro_batches}
        for span in record.spans:
            self._times[span.micro_batch][span.stage] = span.end - span.begin

    def seconds(self, shape: MicroBatchShape) -> list[float]:
        self.asked += 1
        if self.asked > len(self.micro_batches):
            return super().seconds(shape)
        micro_batch = self.micro_batches[self.asked - 1]
        self.alike += (micro_batch.num_tokens, micro_batch.decode_context) == (shape.rows, shape.context)
        return list(self._times[micro_batch.micro_batch])


def _from_json(value: Any) -> Any:
    """Turn a config's value read from JSON back: JSON has no infinity, so it holds "inf"."""
    if isinstance(value, dict):
        return {key: _from_json(below) for key, below in value.items()}
    if isinstance(value, list):
        return [_from_json(below) for below in value]
    return math.inf if value == "inf" else value


if __name__ == "__main__":
    sys.exit(main())
