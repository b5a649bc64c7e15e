"""`gapless simulate`: simulates one or several policies with one workload on a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ..conf.build import to_mapping
from ..conf.policies import SchedulerConfig
from ..conf.schema import SimulateConfig
from .progress import Meter, print_throughput, print_words
from .prompts import StandardInput
from .results import compare, folder_of, log_cut_requests, show_first, show_one, show_tables, write_counted, write_turn
from .turns import Turn, expected, labels, policies, requests, turns

if TYPE_CHECKING:
    from ..runtime.analysis.run_folder.read import RunFolder
    from ..runtime.engine.plan import Plan
    from ..runtime.pipeline.launcher import Launcher
    from ..runtime.simulation.pipeline.replicas import Replica
    from ..runtime.simulation.pipeline.setting import Setting
    from ..runtime.simulation.workload import Workload


@dataclass(frozen=True, slots=True)
class PreparedSimulation:
    """A validated comparison: the setting of each policy, and the requests of at most `context` tokens."""

    settings: dict[SchedulerConfig, Setting]
    workload: Workload
    context: int


def prepare(config: SimulateConfig, stdin: StandardInput) -> PreparedSimulation:
    """Validate a simulation before it starts.

    Raises:
        ConfigError: a policy, the workload, the profile or the hardware is invalid, or the model does not fit.
    """
    from ..runtime.simulation.pipeline.setting import make_setting

    settings = {policy: make_setting(replace(config, scheduler=policy)) for policy in policies(config)}
    return PreparedSimulation(settings, *requests(config, _plans(settings)))


def _plans(settings: Mapping[SchedulerConfig, Setting]) -> dict[SchedulerConfig, Plan]:
    return {policy: setting.plan for policy, setting in settings.items()}


def run(
    config: SimulateConfig,
    prepared: PreparedSimulation,
    run_dir: Path,
    launcher: Launcher | None = None,
    *,
    brief: bool = False,
) -> None:
    """Simulate each policy, and write run folders and the comparison; `brief` prints one line per run.

    Raises:
        ValueError: an error that the user can correct.
        PipelineError: a request was lost.
    """
    from ..runtime.analysis.ledger.fleet import Fleet
    from ..runtime.analysis.run_folder.titles import comparison_title, title_of
    from ..runtime.core.garbage_collection import without_collector
    from ..runtime.simulation.cost.error import error_text

    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    plan = turns(config, interleave=False)
    workload = prepared.workload
    log_cut_requests(workload, prepared.context)
    configs = [to_mapping(replace(config, scheduler=turn.policy)) for turn in plan]
    title = title_of(configs[0]) if len(plan) == 1 else comparison_title(configs, labels(policies(config)))
    one_line = len(plan) == 1 and brief
    is_alone = len(plan) == 1 and not brief
    error = prepared.settings[plan[0].policy].error  # the same for all: their stages run on the same devices
    if not one_line:
        console.print(Text(title, "bold"), soft_wrap=True)
    printed: set[str] = set()
    folders: list[RunFolder] = []
    for done, turn in enumerate(plan, 1):
        name = turn.label if len(plan) == 1 else f"{done}/{len(plan)} {turn.label}"
        replicas = simulate(config, prepared, turn, errors, name)
        if (totals := replicas[0].totals) is not None:
            summary = write_counted(run_dir / turn.folder, totals.summary(replicas[0].record), config, turn, error)
            print_throughput(console, name, summary)
            show_tables(console, summary)
            continue
        with without_collector():
            num_prefill = config.simulation.disaggregation.prefill_replicas or 0
            fleet = Fleet([replica.record for replica in replicas], num_prefill=num_prefill)
        say = partial(show_first, console, name) if is_alone else None
        run = write_turn(run_dir / turn.folder, fleet, config, turn, error, say=say)
        if len(plan) > 1:
            folders.append(folder_of(run_dir / turn.folder, run))
        if not is_alone:
            print_throughput(console, title if one_line else name, run.summary)
        for note in (f"{turn.label}: {note}" for note in fleet.notes):
            if note not in printed:
                printed.add(note)
                print_words(console, Text(note))
    if one_line:
        return
    if config.simulation.record and len(plan) == 1:
        show_one(console, run_dir, run)
    elif config.simulation.record:
        compare(console, run_dir, config, plan, folders, workload.num_cut, "simulate.json")
    print_words(console, Text(error_text(error)))


def simulate(
    config: SimulateConfig, prepared: PreparedSimulation, turn: Turn, errors: Console, name: str
) -> list[Replica]:
    """Simulate one turn and return its replicas with their records."""
    from ..runtime.analysis.ledger.running_totals import RunningTotals
    from ..runtime.simulation.pipeline.run import start

    seeded = replace(config.workload, seed=config.workload.seed + turn.repeat - 1)
    workload, _ = requests(replace(config, workload=seeded), _plans(prepared.settings))
    replicas, ends = start(prepared.settings[turn.policy], workload, repeat=turn.repeat, make_totals=RunningTotals)
    with Meter(errors, expected(config.workload, workload), name) as meter:
        for ended in ends:
            if ended:
                meter.update(0, ended, 0.0)
    return replicas
