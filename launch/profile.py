"""`gapless profile`: measures a model's operators on this machine, and the prediction errors of a fitted cost model."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from ..conf.errors import ConfigError
from ..conf.profiling import ProfileConfig
from ..conf.user_path import user_path
from .progress import Steps, print_files, starting, versions
from .prompts import StandardInput

if TYPE_CHECKING:
    from ..runtime.pipeline.launcher import Launcher
    from ..runtime.pipeline.protocol import Pipeline
    from ..runtime.simulation.cost.profile_folder import ProfileFolder
    from ..runtime.simulation.cost.profile_point import Point
    from ..runtime.simulation.profiling.prediction_error import PredictionError
    from ..runtime.simulation.profiling.profile_plan import ProfilePlan

_log = logging.getLogger(__name__)


def prepare(config: ProfileConfig, stdin: StandardInput) -> ProfilePlan | ProfileFolder:
    """Validate a profile before anything is measured.

    Returns:
        The measurement plan; or, with `check`, the profile folder.

    Raises:
        ConfigError: the model, memory, grid, launcher or the folder of `check` is invalid.
    """
    from ..runtime.pipeline.launcher import check_launcher
    from ..runtime.simulation.cost.profile_folder import ProfileFolder
    from ..runtime.simulation.profiling.profile_plan import plan_profile

    if config.check is not None:
        folder = ProfileFolder(user_path(config.check, "check"), f"check={config.check}")
        folder.about()
        return folder
    plan = plan_profile(config)
    if config.pipeline:
        check_launcher(config.parallel, config.hardware)
    if config.hardware.device == "cuda":
        _check_devices(plan.about.ranks)
    return plan


def run(
    config: ProfileConfig,
    prepared: ProfilePlan | ProfileFolder,
    run_dir: Path,
    launcher: Launcher | None = None,
) -> None:
    """Measure what is missing in `run_dir`, then print the errors of the cost model on held-out points.

    Raises:
        ValueError: an error that the user can correct.
        PipelineError: a rank failed.
    """
    from ..runtime.simulation.cost.profile_folder import ProfileFolder

    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    if isinstance(prepared, ProfileFolder):
        with suppress(OSError):
            run_dir.rmdir()  # created for this command, and empty
        show_errors(console, prepared)
        return
    plan = prepared
    folder = ProfileFolder(run_dir)
    folder.begin(plan.about, versions(), _device_name(config.hardware.device))
    measure_operators(plan, folder, config.samples, errors)
    if config.pipeline:
        measure_pipeline(plan, folder, config.samples, errors, launcher)
    show_errors(console, folder)
    print_files(console, ("profile", run_dir))


def measure_operators(plan: ProfilePlan, folder: ProfileFolder, samples: int, errors: Console) -> None:
    """Measure operators on concurrent ranks until each micro-batch has `samples` measurements on each stage."""
    from ..runtime.simulation.cost.profile_folder import OperatorSample
    from ..runtime.simulation.profiling.session import missing
    from ..runtime.simulation.profiling.session import run as measure

    have: dict[int, Counter[Point]] = {stage: Counter() for stage in range(plan.setup.pp)}
    for sample in folder.operators():
        have[sample.stage][sample.point] += 1
    todo = {stage: missing(plan.operators, samples, counted, seed=0) for stage, counted in have.items()}
    total = sum(map(len, todo.values()))
    if not total:
        return
    about = plan.about
    what = f"operators on {_side_by_side(about.ranks, about.threads)}"
    _log.info("%s: %d to measure", what, total)
    with Steps(errors, "profile") as steps:
        for done, (stage, point, seconds) in enumerate(measure(plan.setup, about.device, plan.operators, todo), 1):
            folder.add_operators([OperatorSample(stage, point, seconds)])
            steps.update(what, done, total)


def measure_pipeline(
    plan: ProfilePlan, folder: ProfileFolder, samples: int, errors: Console, launcher: Launcher | None = None
) -> None:
    """Run micro-batches through the real pipeline until each has `samples` measurements."""
    from ..runtime.engine.start import start_pipeline
    from ..runtime.simulation.profiling.grid import MessageMaker
    from ..runtime.simulation.profiling.pipeline_timing import time_micro_batches
    from ..runtime.simulation.profiling.session import missing

    have = Counter((sample.in_flight, sample.point) for sample in folder.stages() if sample.stage == 0)
    depth = plan.plan.limits.depth.most
    rounds: list[tuple[int, list[Point]]] = []
    for in_flight, points in ((1, plan.sent), (depth, plan.mixed)):
        counted = Counter({point: have[in_flight, point] for point in points})
        rounds.append((in_flight, missing(points, samples, counted, seed=in_flight)))
    total = sum(len(points) for _, points in rounds)
    if not total:
        return
    block = plan.config.block_size
    with starting(errors, plan.config) as on_progress:
        pipeline = start_pipeline(plan.config, plan.plan, launcher, on_progress)
    try:
        maker = MessageMaker(plan.plan.arch.vocab_size, block)
        what = "micro-batches through the pipeline"
        _log.info("%s: %d to measure", what, total)
        with Steps(errors, "profile") as steps:
            for _ in time_micro_batches(pipeline, maker, plan.fill, in_flight=depth):
                pass
            measured = (
                sample
                for in_flight, points in rounds
                for sample in time_micro_batches(pipeline, maker, _placed(points, pipeline, block), in_flight=in_flight)
            )
            for done, sample in enumerate(measured, 1):
                folder.add_stages(sample)
                steps.update(what, done, total)
    finally:
        pipeline.close()


def _placed(points: Iterable[Point], pipeline: Pipeline, block_size: int) -> Iterator[tuple[Point, int]]:
    """Yield each point with a random first KV block."""
    draw = random.Random(0)
    for point in points:
        yield point, draw.randint(0, pipeline.num_blocks - point.slots(block_size) // block_size)


def show_errors(console: Console, folder: ProfileFolder) -> None:
    """Print the tables of `held_out_errors` and `stage_errors` of a profile.

    Raises:
        ConfigError: the profile is damaged or unfinished.
    """
    from ..runtime.simulation.cost.measured import MeasuredOperators, measured_host, stage_error
    from ..runtime.simulation.cost.stage_costs import StageCosts
    from ..runtime.simulation.profiling.prediction_error import held_out_errors, send_errors, stage_errors

    operators, stages, about = folder.operators(), folder.stages(), folder.about()
    try:
        found = MeasuredOperators(operators)
    except ValueError:
        raise ConfigError(f"{folder.path}: unfinished; run the same command again to continue") from None
    ranks = _side_by_side(about.ranks, about.threads)
    console.print(f"{about.model} on {ranks}: {len(operators)} measurements of operators", soft_wrap=True)
    console.print(_table("held-out points", [*held_out_errors(operators), *send_errors(stages)]))
    if stages:
        costs = StageCosts(about.layers, [found] * len(about.layers))
        console.print(_table("whole stages", stage_errors(costs, stages)))
        host = measured_host(operators, about.layers, stages)
        console.print(
            f"micro-batches take {host.stretch:.3f} times as long in the pipeline as their operators alone, also when "
            "simulated",
            soft_wrap=True,
        )
        console.print(
            f"host: {host.step * 1e3:.2f} ms per micro-batch; between micro-batches: dispatch "
            f"{host.dispatch * 1e3:.2f} ms, result {host.result * 1e3:.2f} ms, turnaround of a stage "
            f"{host.turnaround * 1e3:.2f} ms",
            soft_wrap=True,
        )
        error = stage_error(MeasuredOperators(operators, host=host), about.layers, stages)
        console.print(f"in simulations with this profile {error.text}", soft_wrap=True)


def _table(what: str, rows: Sequence[PredictionError]) -> Table:
    table = Table()
    for column in (what, "points", "bias", "median error", "p90 error", "scatter"):
        table.add_column(column, justify="left" if column == what else "right")
    for row in rows:
        shares = (f"{row.bias:+.1%}", f"{row.median:.1%}", f"{row.p90:.1%}", f"{row.scatter:.1%}")
        table.add_row(row.what, str(row.points), *shares)
    return table


def _side_by_side(ranks: int, threads: int) -> str:
    return f"{ranks} rank{'s' * (ranks > 1)} of {threads} thread{'s' * (threads > 1)}"


def _device_name(device: str) -> str | None:
    if device != "cuda":
        return None
    import torch

    return str(torch.cuda.get_device_name())


def _check_devices(ranks: int) -> None:
    import torch

    if (there := torch.cuda.device_count()) < ranks:
        raise ConfigError(f"neighbours: {ranks} concurrent ranks need as many CUDA devices; torch finds {there}")
