"""Writes and prints the results of runs: run folders, tables, `bench.json`, and the report of a comparison."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console
from rich.text import Text

from ..conf.build import to_mapping
from ..conf.schema import ComparisonConfig
from .advising import quick_advice
from .progress import print_files, print_throughput, print_words, versions
from .turns import Turn

if TYPE_CHECKING:
    from ..runtime.cost.error import CostError
    from ..runtime.explain.analysed_run import AnalysedRun
    from ..runtime.explain.sized_cause import SizedCause
    from ..runtime.ledger.fleet import Fleet
    from ..runtime.run_folder.read import RunFolder
    from ..runtime.run_folder.run_info import RunInfo
    from ..runtime.workload import Workload


_log = logging.getLogger(__name__)
_MOST_SPANS = 200_000  # of a run whose record stays in memory until the comparison: some 50 MB


def log_cut_requests(workload: Workload, context: int) -> None:
    """Log how many requests are cut to the `context`, in tokens, if any are."""
    if workload.num_cut:
        text = "requests longer than the context of %d tokens, and cut to it: %d of %d"
        _log.info(text, context, workload.num_cut, len(workload))


def write_counted(
    folder: Path, numbers: dict[str, Any], config: ComparisonConfig, turn: Turn, cost_error: CostError | None = None
) -> dict[str, Any]:
    """Write `summary.json` alone, for a run that kept no record, and return what it holds."""
    from ..runtime.run_folder.write import write_summary

    summary = _info(config, turn, cost_error).summary(numbers)
    write_summary(folder, summary)
    return summary


def write_turn(
    folder: Path,
    fleet: Fleet,
    config: ComparisonConfig,
    turn: Turn,
    cost_error: CostError | None = None,
    *,
    title: str = "",
    say: Callable[[AnalysedRun], None] | None = None,
) -> AnalysedRun:
    """Write the run folder of one turn with its own config, and return the run analysed.

    Args:
        folder: the run folder, which is made if need be.
        fleet: what was recorded.
        config: of the whole comparison.
        turn: names the policy and the repeat.
        cost_error: how far the stage times of a simulation may be off; None: not known.
        title: of the report; by default what its config says.
        say: prints the run before the folder is written; only for a run that stands alone, whose causes are then found
            by short replays.
    """
    from ..runtime.explain.analysed_run import AnalysedRun
    from ..runtime.report.write_folder import write_run_folder
    from ..runtime.run_folder.files import write_text

    info = replace(_info(config, turn, cost_error), title=title)
    run = AnalysedRun(fleet, info)
    try:
        if say is not None:
            run = replace(run, explain=quick_advice)
            say(run)
    finally:  # who reads may have gone
        write_run_folder(folder, run)
    if turn.folder:  # hydra writes the config of a run that stands alone; a turn of several gets the same here
        (folder / ".hydra").mkdir(exist_ok=True)
        text = yaml.safe_dump(_own(config, turn), sort_keys=False)
        write_text(folder / ".hydra" / "config.yaml", text)
    return run


def folder_of(path: Path, run: AnalysedRun) -> RunFolder:
    """Return the folder of a run that was written, for a comparison. A large record does not stay in memory."""
    from ..runtime.run_folder.read import RunFolder

    is_large = sum(len(record.spans) for record in run.fleet.records) > _MOST_SPANS
    return RunFolder(path, run.summary) if is_large else run.folder(path)


def _info(config: ComparisonConfig, turn: Turn, cost_error: CostError | None) -> RunInfo:
    from ..runtime.run_folder.run_info import RunInfo

    error = cost_error.numbers if cost_error is not None else None
    return RunInfo(plain(_own(config, turn)), versions(), slo=config.slo, cost_error=error)


def _own(config: ComparisonConfig, turn: Turn) -> dict[str, Any]:
    """Return the config of one turn alone."""
    return to_mapping(replace(config, scheduler=turn.policy, policies=(), repeats=1))


def show_one(console: Console, run_dir: Path, run: AnalysedRun, *files: tuple[str, Path]) -> None:
    """Print a single run's tables and the paths of its files."""
    summary, slo = run.summary, run.info.slo
    if "request_goodput" in summary and slo is not None:
        bounds = " ".join(f"{key}={bound:g}" for key, bound in to_mapping(slo).items() if bound is not None)
        console.print(f"goodput: {summary['request_goodput']:.2f} requests/s within {bounds}")
    show_tables(console, summary, run.fleet, run.causes)
    print_files(console, *files, ("report", run_dir / "report.html"))


def show_tables(
    console: Console, summary: dict[str, Any], fleet: Fleet | None = None, causes: Sequence[SizedCause] = ()
) -> None:
    """Print latencies, idle time by cause where it is known, faults and stragglers."""
    from ..runtime.report.terminal import bubble_table, causes_table, fault_lines, latency_table, straggler_lines

    if causes:
        console.print(causes_table(causes))
    console.print(latency_table(summary))
    if fleet is not None and "bubble_fraction" in summary:
        console.print(bubble_table(fleet, causes))
    for line in (*fault_lines(summary), *straggler_lines(summary)):
        print_words(console, Text(line))


def show_first(console: Console, name: str, run: AnalysedRun) -> None:
    """Print the throughput of a run after its name, then the run in words."""
    print_throughput(console, name, run.summary)
    show_words(console, run.words)


def show_words(console: Console, words: Sequence[str]) -> None:
    """Print the sentences of a run, the first one bold."""
    for place, sentence in enumerate(words):
        print_words(console, Text(sentence, "bold" if place == 0 else ""))


def compare(
    console: Console,
    run_dir: Path,
    config: ComparisonConfig,
    plan: Sequence[Turn],
    folders: Sequence[RunFolder],
    num_cut: int,
    name: str = "bench.json",
) -> None:
    """Print the table, and write the numbers as `name` and the comparison's report."""
    from ..runtime.report.run_groups import RunGroup
    from ..runtime.report.terminal import comparison_table
    from ..runtime.report.write_comparison import write_comparison
    from ..runtime.run_folder.files import write_text

    runs: dict[str, list[RunFolder]] = {}
    for turn, folder in zip(plan, folders, strict=True):
        runs.setdefault(turn.label, []).append(folder)
    candidates = [RunGroup(label, of_label) for label, of_label in runs.items()]
    comparison = write_comparison(run_dir, candidates)
    numbers = {
        "config": plain(to_mapping(config)),
        "versions": versions(),
        "requests": max(folder.summary["completed"] + folder.summary["failed"] for folder in folders),
        "cut_requests": num_cut,
        "policies": {row["label"]: row["metrics"] for row in comparison["candidates"]},
        "runs": [
            {"folder": turn.folder, "policy": turn.label, "repeat": turn.repeat}
            | {key: value for key, value in folder.summary.items() if key not in ("config", "versions")}
            for turn, folder in zip(plan, folders, strict=True)
        ],
    }
    write_text(run_dir / name, json.dumps(numbers, indent=2) + "\n")
    console.print(comparison_table(candidates))
    print_files(console, ("numbers", run_dir / name), ("report", run_dir / "report.html"))


def plain(value: Any) -> Any:
    """Replace infinities, which JSON cannot hold, by `"inf"`."""
    if isinstance(value, dict):
        return {key: plain(below) for key, below in value.items()}
    if isinstance(value, list):
        return [plain(below) for below in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value
