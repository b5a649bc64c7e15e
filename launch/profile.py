"""`gapless profile`: measures a model's operators on this machine, and the error of a cost model fitted to them."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ..conf.errors import ConfigError
from ..conf.profiling import ProfileConfig
from ..conf.user_path import user_path
from . import import_tables
from .progress import can_redraw, print_files, starting, versions
from .prompts import StandardInput

if TYPE_CHECKING:
    from ..runtime.cost.profile_folder import ProfileFolder
    from ..runtime.cost.profile_point import Point
    from ..runtime.pipeline.launcher import Launcher
    from ..runtime.pipeline.protocol import Pipeline
    from ..runtime.profiling.measurements import OperatorTables
    from ..runtime.profiling.prediction_error import PredictionError
    from ..runtime.profiling.profile_plan import ProfilePlan

_log = logging.getLogger(__name__)


def prepare(config: ProfileConfig, stdin: StandardInput) -> ProfilePlan | ProfileFolder | OperatorTables:
    """Check a profile before anything is measured.

    Returns:
        What to measure; with `check`, the folder whose errors to show; with `import`, what the tables hold.

    Raises:
        ConfigError: the model, the memory, the grid, the launcher or the folder of `check` is wrong.
    """
    from ..runtime.cost.profile_folder import ProfileFolder
    from ..runtime.pipeline.launcher import check_launcher
    from ..runtime.profiling.profile_plan import plan_profile

    if config.import_ is not None:
        return import_tables.read(config)
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
    prepared: ProfilePlan | ProfileFolder | OperatorTables,
    run_dir: Path,
    launcher: Launcher | None = None,
) -> None:
    """Measure what `run_dir` does not hold yet, then show the error of the cost model on points it was not fitted to.

    Raises:
        ValueError: what the user can correct.
        PipelineError: a rank failed.
    """
    from ..runtime.cost.profile_folder import ProfileFolder
    from ..runtime.profiling.measurements import OperatorTables

    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    if isinstance(prepared, OperatorTables):
        import_tables.run(config, prepared, run_dir)
        return
    if isinstance(prepared, ProfileFolder):
        with suppress(OSError):
            run_dir.rmdir()  # made for this command, and empty
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
    """Measure operators, on ranks side by side, until each micro-batch has `samples` measurements on each stage."""
    from ..runtime.cost.profile_folder import OperatorSample
    from ..runtime.profiling.session import missing
    from ..runtime.profiling.session import run as measure

    have: dict[int, Counter[Point]] = {stage: Counter() for stage in range(plan.setup.pp)}
    for sample in folder.operators():
        have[sample.stage][sample.point] += 1
    todo = {stage: missing(plan.operators, samples, counted, seed=0) for stage, counted in have.items()}
    total = sum(map(len, todo.values()))
    if not total:
        return
    about = plan.about
    with _meter(errors, total, f"operators on {_side_by_side(about.ranks, about.threads)}") as advance:
        for stage, point, seconds in measure(plan.setup, about.device, plan.operators, todo):
            folder.add_operators([OperatorSample(stage, point, seconds)])
            advance()


def measure_pipeline(
    plan: ProfilePlan, folder: ProfileFolder, samples: int, errors: Console, launcher: Launcher | None = None
) -> None:
    """Send whole micro-batches through the real pipeline, until each has `samples` measurements."""
    from ..runtime.engine.start import start_pipeline
    from ..runtime.profiling.grid import MessageMaker
    from ..runtime.profiling.pipeline_timing import time_micro_batches
    from ..runtime.profiling.session import missing

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
        with _meter(errors, total, "steps through the pipeline") as advance:
            for _ in time_micro_batches(pipeline, maker, plan.fill, in_flight=depth):
                pass
            for in_flight, points in rounds:
                for sample in time_micro_batches(
                    pipeline, maker, _placed(points, pipeline, block), in_flight=in_flight
                ):
                    folder.add_stages(sample)
                    advance()
    finally:
        pipeline.close()


def _placed(points: Iterable[Point], pipeline: Pipeline, block_size: int) -> Iterator[tuple[Point, int]]:
    """Yield each point with the number of its first KV block, drawn at random."""
    draw = random.Random(0)
    for point in points:
        yield point, draw.randint(0, pipeline.num_blocks - point.slots(block_size) // block_size)


def show_errors(console: Console, folder: ProfileFolder) -> None:
    """Print the tables of `held_out_errors` and `stage_errors` of a profile.

    Raises:
        ConfigError: the profile is damaged or unfinished.
    """
    from ..runtime.cost.measured import MeasuredOperators, measured_host, stage_error
    from ..runtime.cost.stage_costs import StageCosts
    from ..runtime.profiling.prediction_error import held_out_errors, send_errors, stage_errors

    operators, stages, about = folder.operators(), folder.stages(), folder.about()
    try:
        found = MeasuredOperators(operators)
    except ValueError:
        raise ConfigError(f"{folder.path}: unfinished; run the same command again to go on") from None
    ranks = _side_by_side(about.ranks, about.threads)
    console.print(f"{about.model} on {ranks}: {len(operators)} measurements of operators", soft_wrap=True)
    console.print(_table("held-out points", [*held_out_errors(operators), *send_errors(stages)]))
    if stages:
        costs = StageCosts(about.layers, [found] * len(about.layers))
        console.print(_table("whole stages", stage_errors(costs, stages)))
        host = measured_host(operators, about.layers, stages)
        console.print(
            f"micro-batches take {host.stretch:.3f} times as long in the pipeline as their operators alone, also in "
            "simulations",
            soft_wrap=True,
        )
        console.print(
            f"host: {host.step * 1e3:.2f} ms a micro-batch; between micro-batches: dispatch {host.dispatch * 1e3:.2f} "
            f"ms, result {host.result * 1e3:.2f} ms, turnaround of a stage {host.turnaround * 1e3:.2f} ms",
            soft_wrap=True,
        )
        error = stage_error(MeasuredOperators(operators, host=host), about.layers, stages)
        console.print(f"in a simulation by this profile {error.text}", soft_wrap=True)


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


@contextmanager
def _meter(errors: Console, total: int, what: str) -> Iterator[Callable[[], None]]:
    """Show a bar on a terminal, else a plain line at the start."""
    bar = Progress(
        TextColumn(what, markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=errors,
        disable=not can_redraw(errors),
        transient=True,
        refresh_per_second=4,
    )
    task = bar.add_task("", total=total)
    _log.info("%s: %d to measure", what, total)
    with bar:
        yield lambda: bar.advance(task)


def _device_name(device: str) -> str | None:
    if device != "cuda":
        return None
    import torch

    return str(torch.cuda.get_device_name())


def _check_devices(ranks: int) -> None:
    import torch

    if (there := torch.cuda.device_count()) < ranks:
        raise ConfigError(f"neighbours: {ranks} ranks measure at once, but torch finds only {there} CUDA devices")
