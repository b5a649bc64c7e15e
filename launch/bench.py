"""`gapless bench`: one workload through one or several policies, by turns, on one started pipeline."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console
from rich.text import Text

from ..conf.build import to_mapping
from ..conf.policies import SchedulerConfig
from ..conf.schema import BenchConfig
from ..conf.workloads import SloConfig, WorkloadConfig
from .progress import Meter, shown, starting, throughput, versions
from .prompts import TextInput

if TYPE_CHECKING:
    from ..runtime.launcher import Launcher
    from ..runtime.llm import LLM
    from ..runtime.run_folder import RunFolder
    from ..runtime.spans import RunRecord
    from ..runtime.workload import Workload

WARMUP_REQUESTS = 4
WARMUP_PROMPT = 512  # tokens, at most
WARMUP_OUTPUT = 8


@dataclass(frozen=True, slots=True)
class Turn:
    """One run of one policy; `folder` is relative to the benchmark's own."""

    label: str
    policy: SchedulerConfig
    repeat: int
    folder: str


def check(config: BenchConfig, stdin: TextInput) -> None:
    """What can be said of a run before anything starts.

    Raises:
        ConfigError: of a policy, the workload, the checkpoint or the memory.
    """
    from ..runtime.launcher import check_launcher

    check_launcher(config.parallel, config.hardware)
    requests(config)


def run(config: BenchConfig, run_dir: Path, stdin: TextInput, launcher: Launcher | None = None) -> None:
    """Runs the workload through each policy, and writes a run folder of each and what compares them.

    One run writes into `run_dir` itself. `launcher` stands in for the one that `config` names.

    Raises:
        ValueError: what the user can mend.
        PipelineError: the ranks failed, or not every request got its tokens.
    """
    console = Console(highlight=False)
    errors = Console(stderr=True, highlight=False)
    plan = turns(config)
    workload, context = requests(config)
    if workload.num_cut:
        cut = f"{workload.num_cut} of {len(workload)} requests were longer than the context of {context} tokens"
        errors.print(f"gapless: {cut}: cut to it", soft_wrap=True)
    with starting(errors, config) as on_progress:
        from ..runtime.llm import LLM
        from ..runtime.run_folder import read_run_folder

        first, *others = policies(config)
        llm = LLM.from_config(
            replace(config, scheduler=first), launcher=launcher, on_progress=on_progress, policies=others
        )
    told: set[str] = set()
    done: list[Turn] = []
    with llm:
        if config.warmup:
            _warm_up(llm, workload)
        for turn in plan:
            name = turn.label if len(plan) == 1 else f"{len(done) + 1}/{len(plan)} {turn.label}"
            try:
                summary = _run(llm, turn, workload, run_dir / turn.folder, config, errors, name)
            except BaseException:
                if done:
                    before = f"runs finished before that: {len(done)}; gapless report {shown(run_dir)}"
                    errors.print(f"gapless: {before}", soft_wrap=True)
                raise
            done.append(turn)
            console.print(Text.assemble((f"{name}: ", "bold"), throughput(summary)), soft_wrap=True)
            for note in (f"{turn.label}: {note}" for note in llm.record.notes):
                if note not in told:
                    told.add(note)
                    console.print(Text(note), soft_wrap=True)
    if len(plan) == 1:
        _show_one(console, run_dir, summary, llm.record, config.slo)
        return
    folders = [read_run_folder(run_dir / turn.folder) for turn in plan]
    _compare(console, run_dir, config, plan, folders, len(workload), workload.num_cut)


def requests(config: BenchConfig) -> tuple[Workload, int]:
    """The requests of a benchmark, and the most tokens that one may come to under any of its policies.

    Raises:
        ConfigError: of the workload, the checkpoint or the memory.
    """
    from ..runtime.plan import make_plan

    plans = [make_plan(replace(config, scheduler=policy)) for policy in policies(config)]
    arch, blocks = plans[0].arch, max(plan.num_blocks for plan in plans)
    context = min(arch.max_position, blocks * config.cache.block_size)
    return _requests(config.workload, plans[0].tokenizer, arch.vocab_size, context), context


@lru_cache(maxsize=2)  # made to check them, and again to run them
def _requests(workload: WorkloadConfig, tokenizer: str | None, vocab_size: int, context: int) -> Workload:
    from ..models.tokenizer import load_tokenizer
    from ..runtime.workload import make_workload

    encoder = load_tokenizer(tokenizer, vocab_size)
    return make_workload(workload, vocab_size=vocab_size, context=context, tokenizer=encoder)


def policies(config: BenchConfig) -> tuple[SchedulerConfig, ...]:
    """What is compared; at least one."""
    return config.policies or (config.scheduler,)


def turns(config: BenchConfig) -> list[Turn]:
    """What runs, in this order."""
    named = list(zip(labels(policies(config)), policies(config), strict=True))
    if config.interleave:
        order = [(label, policy, repeat) for repeat in range(1, config.repeats + 1) for label, policy in named]
    else:
        order = [(label, policy, repeat) for label, policy in named for repeat in range(1, config.repeats + 1)]
    digits = max(2, len(str(len(order))))
    folders = [f"{n:0{digits}}_{re.sub(r'[^a-z0-9_=.-]+', '_', label)}" for n, (label, *_) in enumerate(order, 1)]
    if len(order) == 1:
        folders = [""]
    return [Turn(*each, folder) for each, folder in zip(order, folders, strict=True)]


def labels(compared: Sequence[SchedulerConfig]) -> list[str]:
    """Names of policies, with the keys in which those of one name differ: `sarathi chunk=128`; each unique."""
    names: list[str] = []
    for policy in compared:
        alike = [to_mapping(other) for other in compared if other.name == policy.name]
        own = to_mapping(policy)
        differing = [key for key in own if any(other[key] != own[key] for other in alike)]
        names.append(
            " ".join([policy.name, *(f"{key}={'null' if own[key] is None else own[key]}" for key in differing)])
        )
    again = [names[:number].count(name) for number, name in enumerate(names)]
    return [f"{name} ({count + 1})" if count else name for name, count in zip(names, again, strict=True)]


def _warm_up(llm: LLM, workload: Workload) -> None:
    """The first requests, shortened: what is made on first use is made then. The next `reset` forgets them."""
    items = [
        replace(item, prompt=item.prompt[:WARMUP_PROMPT], output_len=min(item.output_len, WARMUP_OUTPUT), arrival=0.0)
        for item in workload[:WARMUP_REQUESTS]
    ]
    for _ in llm.replay(items):
        pass


def _run(
    llm: LLM, turn: Turn, workload: Workload, folder: Path, config: BenchConfig, errors: Console, name: str
) -> dict[str, Any]:
    """One run of one policy; its summary."""
    from ..runtime.run_folder import write_run_folder

    llm.reset(turn.policy)
    record = llm.record
    own = replace(config, scheduler=turn.policy, policies=(), repeats=1)

    def write() -> dict[str, Any]:
        summary = write_run_folder(folder, record, config=_plain(to_mapping(own)), versions=versions(), slo=config.slo)
        if turn.folder:  # what hydra writes of a run that stands alone
            (folder / ".hydra").mkdir(exist_ok=True)
            text = yaml.safe_dump(to_mapping(own), sort_keys=False)
            (folder / ".hydra" / "config.yaml").write_text(text, encoding="utf-8")
        return summary

    try:
        with Meter(errors, len(workload), name) as meter:
            for events in llm.replay(workload, max_concurrency=config.workload.max_concurrency):
                tokens = sum(event.token is not None for event in events)
                finished = sum(event.request.is_finished for event in events)
                meter.update(tokens, finished, llm.live_bubble_fraction)
    except BaseException:
        with suppress(Exception):
            write()
            errors.print(f"gapless: the report until then: {shown(folder / 'report.html')}", soft_wrap=True)
        raise
    return write()


def _show_one(console: Console, run_dir: Path, summary: Mapping[str, Any], record: RunRecord, slo: SloConfig) -> None:
    """The tables of a run that stands alone."""
    from ..runtime.ledger import Ledger
    from ..runtime.report.terminal import bubble_table, latency_table

    if "request_goodput" in summary:
        bounds = " ".join(f"{key}={bound:g}" for key, bound in to_mapping(slo).items() if bound is not None)
        console.print(f"goodput: {summary['request_goodput']:.2f} requests/s within {bounds}")
    console.print(latency_table(summary))
    console.print(bubble_table(Ledger(record)))
    console.print(Text.assemble(("report   ", "bold"), shown(run_dir / "report.html")), soft_wrap=True)


def _compare(
    console: Console,
    run_dir: Path,
    config: BenchConfig,
    plan: Sequence[Turn],
    folders: Sequence[RunFolder],
    num_requests: int,
    num_cut: int,
) -> None:
    """The table, `bench.json`, and the comparison's report."""
    from ..runtime.report.candidates import Candidate
    from ..runtime.report.compare import write_comparison
    from ..runtime.report.terminal import comparison_table

    runs: dict[str, list[RunFolder]] = {}
    for turn, folder in zip(plan, folders, strict=True):
        runs.setdefault(turn.label, []).append(folder)
    candidates = [Candidate(label, of_it) for label, of_it in runs.items()]
    comparison = write_comparison(run_dir, candidates)
    told = {
        "config": _plain(to_mapping(config)),
        "versions": versions(),
        "requests": num_requests,
        "cut_requests": num_cut,
        "policies": {row["label"]: row["metrics"] for row in comparison["candidates"]},
        "runs": [
            {"folder": turn.folder, "policy": turn.label, "repeat": turn.repeat}
            | {key: value for key, value in folder.summary.items() if key not in ("config", "versions")}
            for turn, folder in zip(plan, folders, strict=True)
        ],
    }
    (run_dir / "bench.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    console.print(comparison_table(candidates))
    for label, name in (("numbers", "bench.json"), ("report", "report.html")):
        console.print(Text.assemble((f"{label:9}", "bold"), shown(run_dir / name)), soft_wrap=True)


def _plain(value: Any) -> Any:
    """`value` as JSON takes it: it has no infinity."""
    if isinstance(value, dict):
        return {key: _plain(below) for key, below in value.items()}
    if isinstance(value, list):
        return [_plain(below) for below in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value
