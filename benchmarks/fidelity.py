"""Compares real runs with their simulated twins: `python -m benchmarks.fidelity`, or `make fidelity`.

A LLaMA of about 160M parameters with random weights serves two workloads under three policies, over two pipeline stages
of one thread each. In each round each policy runs once for real on each workload (`gapless bench`). Before each run the
machine's operators are profiled (`gapless profile`), and the profile's micro-batches run through the real pipeline, for
about as long as the run. All rounds add to one profile: the speed of a shared machine changes from one second to the
next, so profile and runs match only on average. Each policy is then simulated on each workload (`gapless simulate`)
with that profile. Nothing in the simulation is fitted to the runs.

Each difference has a standard error, from the spread of the runs and of the profiled micro-batches. A difference within
two standard errors of its bound needs more rounds to decide.

A twin can differ for two reasons: the profile mispredicts stage times, or the simulation is wrong about something else,
such as sends, control or the order of micro-batches. The last table separates the two: it simulates each real run again
with that run's measured stage times.

Further arguments are overrides of `gapless bench` and `gapless simulate`. About ten minutes per round on 2 otherwise
idle cores.
"""

from __future__ import annotations

import math
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from gapless.conf.profiling import ProfileConfig
from gapless.launch.compose import compose_one
from gapless.launch.profile import measure_pipeline
from gapless.launch.turns import requests
from gapless.runtime.analysis.explain.twin import config_of
from gapless.runtime.analysis.ledger.causes import CAUSES
from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.analysis.run_folder.read import RunFolder, read_run_folder
from gapless.runtime.core.run_record import RunRecord
from gapless.runtime.simulation.cost.measured import MeasuredOperators, pace
from gapless.runtime.simulation.cost.profile_folder import ProfileFolder
from gapless.runtime.simulation.cost.stage_costs import MicroBatchShape, StageCosts
from gapless.runtime.simulation.pipeline.replicas import make_replicas, run_fleet
from gapless.runtime.simulation.pipeline.setting import make_setting
from gapless.runtime.simulation.profiling.profile_plan import plan_profile

from .support.harness import Benchmark, run_gapless, words

POLICIES = {
    "orca_best": "scheduler=orca_best",
    "sarathi": "scheduler=sarathi scheduler.chunk=64",
    "equal_time": "scheduler=equal_time scheduler.chunk=64",
}
MACHINE = "model=llama-160m hardware=cpu parallel=pp2 parallel.threads=1"
SETTING = f"{MACHINE} cache.num_blocks=512 scheduler.batch=4"
FIXED = "workload=fixed workload.input_len=400 workload.output_len=40 workload.num_prompts=12"
WORKLOADS = {
    "fixed": FIXED,
    "zipf": "workload=zipf workload.theta=0.4 workload.min_len=256 workload.max_len=768 workload.pd_ratio=10 "
    "workload.num_prompts=12",
}
PROFILE = "profile"
PIPELINE_SAMPLES = 3  # passes per micro-batch before a run; about as long as the run
REQUIRED = {
    "makespan": ("makespan, twin over real", 0.05),
    "busy": ("busy time of each stage, twin over real", 0.05),
    "cause": ("idle seconds of each cause, over the run's span", 0.10),
}


def main() -> int:
    bench = Benchmark(__doc__, rounds=3, out=Path("runs/fidelity"), report=False, overrides=True)
    out, overrides = bench.given.out, bench.given.overrides
    if not bench.given.report:
        shutil.rmtree(out, ignore_errors=True)
        for turn, cell in enumerate(CELLS * bench.given.rounds):
            profile(out / PROFILE, turn + 1)
            folder = cell.real(out, turn // len(CELLS) + 1)
            run_gapless("bench", *words(cell.setting, *overrides, f"hydra.run.dir={folder}"))
    for cell in CELLS:
        shutil.rmtree(cell.twin(out), ignore_errors=True)
        keys = f"simulation.profile={out / PROFILE} hydra.run.dir={cell.twin(out)}"
        run_gapless("simulate", *words(cell.setting, *overrides, keys))
    report(bench, out)
    return bench.end()


class Cell(NamedTuple):
    """A policy on a workload, with the folders of its runs."""

    workload: str
    policy: str

    @property
    def setting(self) -> str:
        return f"{SETTING} {POLICIES[self.policy]} {WORKLOADS[self.workload]}"

    def real(self, out: Path, number: int) -> Path:
        return out / f"real_{self.workload}_{self.policy}_{number}"

    def twin(self, out: Path) -> Path:
        return out / f"twin_{self.workload}_{self.policy}"


CELLS = [Cell(workload, policy) for workload in WORKLOADS for policy in POLICIES]


def profile(folder: Path, turn: int) -> None:
    """Add one round of operator and pipeline measurements to the profile."""
    keys = words(MACHINE, f"max_tokens=768 max_context=1024 max_decodes=8 hydra.run.dir={folder}")
    run_gapless("profile", *keys, f"samples={turn}", "pipeline=false")
    plan = plan_profile(compose_one(keys, ProfileConfig, "profile"))
    measure_pipeline(plan, ProfileFolder(folder), turn * PIPELINE_SAMPLES, Console(stderr=True, highlight=False))


@dataclass(frozen=True, slots=True)
class Figures:
    """A run's makespan, busy time per stage, and idle time by cause over all stages, in seconds."""

    makespan: float
    busy: list[float]
    causes: dict[str, float]

    @classmethod
    def of(cls, record: RunRecord) -> Figures:
        ledger = Ledger(record)
        busy = [ledger.busy_seconds(stage) for stage in range(ledger.num_stages)]
        causes = {str(cause): seconds for cause, seconds in ledger.seconds_by_cause().items()}
        return cls(ledger.span_seconds, busy, causes)


def report(bench: Benchmark, out: Path) -> None:
    """Compare real and simulated runs per workload and policy, and check the requirements."""
    folder, rounds = ProfileFolder(out / PROFILE), bench.given.rounds
    stages, operators = folder.stages(), MeasuredOperators(folder.operators())
    each = len(stages) // (rounds * len(CELLS))  # measurements of one turn
    paces = [pace(operators, folder.about().layers, stages[at : at + each]) for at in range(0, len(stages), each)]
    mean = statistics.mean(paces)
    of_profile = _error(paces) / mean
    bench.row("pace", mean_ratio=mean, least_ratio=min(paces), most_ratio=max(paces), error_share=of_profile)
    worst = dict.fromkeys(REQUIRED, (0.0, 0.0))

    def row(cell: Cell, kind: str, name: str, real: list[float], twin: float, over: float | None = None) -> None:
        """Compare the twin with the median of the runs, relative to it or to `over`, with its standard error."""
        middle = statistics.median(real)
        off = (twin - middle) / (over or middle)
        error = math.hypot(1.25 * _error(real), of_profile * twin) / (over or middle)  # 1.25: of a median
        worst[kind] = max(worst[kind], (abs(off), error))
        seconds = {"real_median_s": middle, "real_least_s": min(real), "real_most_s": max(real), "twin_s": twin}
        shares = {"difference_share": off, "error_share": error, "relative_to": "span" if over else "real"}
        bench.row("twins", **cell._asdict(), figure=name, **seconds, **shares)

    for cell in CELLS:
        twin = Figures.of(read_run_folder(cell.twin(out)).load())
        runs = [read_run_folder(cell.real(out, number)) for number in range(1, rounds + 1)]
        real = [Figures.of(run.load()) for run in runs]
        spans = [run.makespan for run in real]
        row(cell, "makespan", "makespan", spans, twin.makespan)
        for stage, busy in enumerate(twin.busy):
            row(cell, "busy", f"busy, stage {stage}", [run.busy[stage] for run in real], busy)
        for cause in map(str, CAUSES):
            seconds = [run.causes[cause] for run in real]
            if max(*seconds, twin.causes[cause]) > 0.002 * min(spans):
                row(cell, "cause", cause, seconds, twin.causes[cause], statistics.median(spans))
        for run, found in zip(runs, real, strict=True):
            again, alike = with_own_times(run, out / PROFILE)
            causes = {cause: (again.causes[cause] - of) / found.makespan for cause, of in found.causes.items()}
            cause = max(causes, key=lambda cause: abs(causes[cause]))
            ratio, most_off = again.makespan / found.makespan, {"cause": cause, "cause_share_of_span": causes[cause]}
            bench.row("replays", **cell._asdict(), makespan_ratio=ratio, **most_off, alike_share=alike)
    for kind, (what, allowed) in REQUIRED.items():
        off, error = worst[kind]
        verdict = "met" if off <= allowed else "not met" if off - 2 * error > allowed else "too few rounds to decide"
        most = {"most_difference_share": off, "error_share": error, "allowed_share": allowed}
        bench.row("requirements", requirement=what, **most, verdict=verdict)


def _error(samples: Sequence[float]) -> float:
    """Return the standard error of the mean of `samples`."""
    return statistics.stdev(samples) / math.sqrt(len(samples)) if len(samples) > 1 else math.inf


def with_own_times(folder: RunFolder, profile: Path) -> tuple[Figures, float]:
    """Simulate a real run with its measured stage times; also return the share of equal micro-batches."""
    config = config_of(folder)
    config = replace(config, simulation=replace(config.simulation, profile=str(profile)))
    (replica,) = make_replicas(make_setting(config))
    own = _OwnTimes(folder.load(), replica.pipeline.costs)
    replica.pipeline.costs = own
    for _ in run_fleet([replica], requests(config)[0].without_prompts()):
        pass
    return Figures.of(replica.record), own.alike / max(own.asked, len(own.micro_batches))


class _OwnTimes(StageCosts):
    """Returns a real run's stage times in order of its micro-batches, then those of a cost model."""

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


if __name__ == "__main__":
    sys.exit(main())
