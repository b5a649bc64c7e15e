"""`gapless bench`: benchmarks one or several policies with one workload, on one pipeline."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs
from rich.console import Console
from rich.text import Text

from ..conf.policies import SchedulerConfig
from ..conf.schema import BenchConfig
from .bench_url import PreparedLoad, prepare_load, run_load
from .progress import Meter, print_throughput, print_words, shown, starting
from .prompts import StandardInput
from .results import compare, folder_of, log_cut_requests, show_first, show_one, write_turn
from .turns import Turn, expected, make_plans, policies, requests, turns

if TYPE_CHECKING:
    from ..runtime.analysis.explain.analysed_run import AnalysedRun
    from ..runtime.analysis.run_folder.read import RunFolder
    from ..runtime.engine.llm import LLM
    from ..runtime.engine.plan import Plan
    from ..runtime.pipeline.launcher import Launcher
    from ..runtime.simulation.workload import Workload

_log = logging.getLogger(__name__)
WARMUP_REQUESTS = 4
WARMUP_PROMPT = 512  # maximum tokens
WARMUP_OUTPUT = 8


@dataclass(frozen=True, slots=True)
class PreparedBench:
    """A validated comparison: the plan of each policy, and the requests of at most `context` tokens."""

    plans: dict[SchedulerConfig, Plan]
    workload: Workload
    context: int


def prepare(config: BenchConfig, stdin: StandardInput) -> PreparedBench | PreparedLoad:
    """Validate a comparison before anything starts.

    Raises:
        ConfigError: a policy, the workload or the checkpoint is invalid, or the model does not fit.
    """
    from ..runtime.pipeline.launcher import check_launcher

    if config.url is not None:
        return prepare_load(config)
    check_launcher(config.parallel, config.hardware)
    plans = make_plans(config)
    return PreparedBench(plans, *requests(config, plans))


def run(
    config: BenchConfig,
    prepared: PreparedBench | PreparedLoad,
    run_dir: Path,
    launcher: Launcher | None = None,
    *,
    brief: bool = False,
) -> None:
    """Run the workload with each policy, and write one run folder per run and the comparison.

    A single run writes to `run_dir` itself; with `brief` it prints one line and no tables. `launcher` overrides the one
    in `config`.

    Raises:
        ValueError: an error that the user can correct.
        PipelineError: the ranks failed, or a request did not get all its tokens.
    """
    if isinstance(prepared, PreparedLoad):
        run_load(config, prepared, run_dir, brief=brief)
        return
    console = Console(highlight=False)
    errors = Console(stderr=True, highlight=False)
    plan = turns(config, interleave=config.interleave)
    workload = prepared.workload
    log_cut_requests(workload, prepared.context)
    with starting(errors, config) as on_progress:
        from ..runtime.engine.llm import LLM

        first, *others = policies(config)
        llm = LLM.from_config(
            replace(config, scheduler=first),
            launcher=launcher,
            on_progress=on_progress,
            policies=others,
            plans=prepared.plans,
        )
    printed: set[str] = set()
    done: list[RunFolder] = []
    with llm:
        if config.warmup:
            _warm_up(llm, workload)
        for turn in plan:
            name = turn.label if len(plan) == 1 else f"{len(done) + 1}/{len(plan)} {turn.label}"
            try:
                is_alone = len(plan) == 1 and not brief
                say = partial(show_first, console, name) if is_alone else None
                run = _run(llm, turn, workload, run_dir / turn.folder, config, errors, name, say)
            except BaseException:
                if done:
                    _log.info("finished runs: %d; gapless report %s shows them", len(done), shown(run_dir))
                raise
            done.append(folder_of(run_dir / turn.folder, run))
            if not is_alone:
                print_throughput(console, name, run.summary)
            for note in (f"{turn.label}: {note}" for note in llm.record.notes):
                if note not in printed:
                    printed.add(note)
                    print_words(console, Text(note))
    if len(plan) == 1 and brief:
        return
    if len(plan) == 1:
        show_one(console, run_dir, run)
        return
    compare(console, run_dir, config, plan, done, workload.num_cut)


def _warm_up(llm: LLM, workload: Workload) -> None:
    """Run the first requests, shortened, so that no measured run has first-use costs; `reset` discards them."""
    items = [
        structs.replace(
            item, prompt=item.prompt[:WARMUP_PROMPT], output_len=min(item.output_len, WARMUP_OUTPUT), arrival=0.0
        )
        for item in workload[:WARMUP_REQUESTS]
    ]
    for _ in llm.replay(items):
        pass


def _run(
    llm: LLM,
    turn: Turn,
    workload: Workload,
    folder: Path,
    config: BenchConfig,
    errors: Console,
    name: str,
    say: Callable[[AnalysedRun], None] | None,
) -> AnalysedRun:
    """Run one policy once, write its run folder, and return the analysed run."""
    from ..runtime.analysis.ledger.fleet import Fleet
    from ..runtime.analysis.ledger.live_bubbles import LiveBubbles

    llm.reset(turn.policy)
    if workload.warmup is not None:
        for _ in llm.replay(workload.warmup, config.workload):
            pass
        llm.reset(warm=True)
    record = llm.record
    bubbles = LiveBubbles(record)
    try:
        with Meter(errors, expected(config.workload, workload), name) as meter:
            for events in llm.replay(workload, config.workload):
                tokens = sum(event.token is not None for event in events)
                finished = sum(event.is_last for event in events)
                meter.update(tokens, finished, bubbles.fraction())
    except BaseException:
        with suppress(Exception):
            write_turn(folder, Fleet([record]), config, turn)
            _log.info("report up to the failure: %s", shown(folder / "report.html"))
        raise
    return write_turn(folder, Fleet([record]), config, turn, say=say)
