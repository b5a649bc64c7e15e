"""`gapless bench`: one workload through one or several policies, by turns, on one started pipeline."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs
from rich.console import Console
from rich.text import Text

from ..conf.policies import SchedulerConfig
from ..conf.schema import BenchConfig
from .progress import Meter, print_words, shown, starting, throughput
from .prompts import TextInput
from .results import compare, show_one, tell_cut, write_turn
from .turns import Turn, make_plans, policies, requests, turns

if TYPE_CHECKING:
    from ..runtime.engine.llm import LLM
    from ..runtime.engine.plan import Plan
    from ..runtime.pipeline.launcher import Launcher
    from ..runtime.workload import Workload

WARMUP_REQUESTS = 4
WARMUP_PROMPT = 512  # tokens, at most
WARMUP_OUTPUT = 8


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked comparison: the plan of each policy, and the requests, of at most `context` tokens each."""

    plans: dict[SchedulerConfig, Plan]
    workload: Workload
    context: int


def prepare(config: BenchConfig, stdin: TextInput) -> Prepared:
    """Check a comparison before anything starts.

    Raises:
        ConfigError: a policy, the workload or the checkpoint is wrong, or the model does not fit.
    """
    from ..runtime.pipeline.launcher import check_launcher

    check_launcher(config.parallel, config.hardware)
    plans = make_plans(config)
    return Prepared(plans, *requests(config, plans))


def run(
    config: BenchConfig, prepared: Prepared, run_dir: Path, launcher: Launcher | None = None, *, brief: bool = False
) -> None:
    """Run the workload through each policy, and write a run folder of each and what compares them.

    A single run writes into `run_dir` itself; with `brief` it prints one line and no tables. `launcher` stands in for
    the one that `config` names.

    Raises:
        ValueError: what the user can mend.
        PipelineError: the ranks failed, or not every request got its tokens.
    """
    console = Console(highlight=False)
    errors = Console(stderr=True, highlight=False)
    plan = turns(config, interleave=config.interleave)
    workload = prepared.workload
    tell_cut(errors, workload, prepared.context)
    with starting(errors, config) as on_progress:
        from ..runtime.engine.llm import LLM
        from ..runtime.ledger.fleet import Fleet
        from ..runtime.run_folder.read import read_run_folder

        first, *others = policies(config)
        llm = LLM.from_config(
            replace(config, scheduler=first), launcher=launcher, on_progress=on_progress, policies=others,
            plans=prepared.plans,
        )  # fmt: skip
    printed: set[str] = set()
    done: list[Turn] = []
    with llm:
        if config.warmup:
            _warm_up(llm, workload)
        for turn in plan:
            name = turn.label if len(plan) == 1 else f"{len(done) + 1}/{len(plan)} {turn.label}"
            try:
                is_alone = len(plan) == 1 and not brief
                summary = _run(llm, turn, workload, run_dir / turn.folder, config, errors, name, advised=is_alone)
            except BaseException:
                if done:
                    before = f"runs finished before that: {len(done)}; gapless report {shown(run_dir)}"
                    errors.print(f"gapless: {before}", soft_wrap=True)
                raise
            done.append(turn)
            print_words(console, Text.assemble((f"{name}: ", "bold"), throughput(summary)))
            for note in (f"{turn.label}: {note}" for note in llm.record.notes):
                if note not in printed:
                    printed.add(note)
                    print_words(console, Text(note))
    if len(plan) == 1 and brief:
        return
    if len(plan) == 1:
        show_one(console, run_dir, summary, Fleet([llm.record]), config.slo)
        return
    folders = [read_run_folder(run_dir / turn.folder) for turn in plan]
    compare(console, run_dir, config, plan, folders, len(workload), workload.num_cut)


def _warm_up(llm: LLM, workload: Workload) -> None:
    """Run the first requests, shortened, so that no measured run pays for first use; `reset` forgets them."""
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
    *,
    advised: bool,
) -> dict[str, Any]:
    """Run one policy once and return the summary."""
    llm.reset(turn.policy)
    record = llm.record
    try:
        with Meter(errors, len(workload), name) as meter:
            for events in llm.replay(workload, max_concurrency=config.workload.max_concurrency):
                tokens = sum(event.token is not None for event in events)
                finished = sum(event.is_last for event in events)
                meter.update(tokens, finished, llm.live_bubble_fraction)
    except BaseException:
        with suppress(Exception):
            write_turn(folder, record, config, turn)
            errors.print(f"gapless: the report until then: {shown(folder / 'report.html')}", soft_wrap=True)
        raise
    return write_turn(folder, record, config, turn, advised=advised)
