"""Writes and prints results: run folders, tables, `bench.json`, and comparison reports."""

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
    from ..runtime.analysis.explain.analysed_run import AnalysedRun
    from ..runtime.analysis.explain.sized_cause import SizedCause
    from ..runtime.analysis.ledger.fleet import Fleet
    from ..runtime.analysis.run_folder.read import RunFolder
    from ..runtime.analysis.run_folder.run_info import RunInfo
    from ..runtime.simulation.cost.error import CostError
    from ..runtime.simulation.workload import Workload


_log = logging.getLogger(__name__)
_MOST_SPANS = 200_000  # limit of a record that is kept in memory for the comparison, about 50 MB


def log_cut_requests(workload: Workload, context: int) -> None:
    """Log how many requests were truncated to `context` tokens, if any."""
    if workload.num_cut:
        text = "truncated to the context length of %d tokens: %d of %d requests"
        _log.info(text, context, workload.num_cut, len(workload))


def write_counted(
    folder: Path, numbers: dict[str, Any], config: ComparisonConfig, turn: Turn, cost_error: CostError | None = None
) -> dict[str, Any]:
    """Write only `summary.json`, for a run without a record, and return its contents."""
    from ..runtime.analysis.run_folder.write import write_summary

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
    """Write the run folder of one turn with its own config, and return the analysed run.

    Args:
        folder: the run folder, created if needed.
        fleet: the recorded runs.
        config: the whole comparison's config.
        turn: the policy and the repeat.
        cost_error: the error of simulated stage times; None: unknown.
        title: the report's title; default: from the config.
        say: prints the run before the folder is written; only for single runs, which are then replayed for quick
            advice.
    """
    from ..runtime.analysis.explain.analysed_run import AnalysedRun
    from ..runtime.analysis.report.write_folder import write_run_folder
    from ..runtime.core.whole_file import write_text

    info = replace(_info(config, turn, cost_error), title=title)
    run = AnalysedRun(fleet, info)
    try:
        if say is not None:
            run = replace(run, explain=quick_advice)
            say(run)
    finally:  # even if printing fails
        write_run_folder(folder, run)
    if turn.folder:  # as hydra does for a single run
        (folder / ".hydra").mkdir(exist_ok=True)
        text = yaml.safe_dump(_own(config, turn), sort_keys=False)
        write_text(folder / ".hydra" / "config.yaml", text)
    return run


def folder_of(path: Path, run: AnalysedRun) -> RunFolder:
    """Return the folder of a written run, for a comparison. Large records are not kept in memory."""
    from ..runtime.analysis.run_folder.read import RunFolder

    is_large = sum(len(record.spans) for record in run.fleet.records) > _MOST_SPANS
    return RunFolder(path, run.summary) if is_large else run.folder(path)


def _info(config: ComparisonConfig, turn: Turn, cost_error: CostError | None) -> RunInfo:
    from ..runtime.analysis.run_folder.run_info import RunInfo

    error = cost_error.numbers if cost_error is not None else None
    return RunInfo(plain(_own(config, turn)), versions(), slo=config.slo, cost_error=error)


def _own(config: ComparisonConfig, turn: Turn) -> dict[str, Any]:
    """Return the config of a single turn."""
    return to_mapping(replace(config, scheduler=turn.policy, policies=(), repeats=1))


def show_one(console: Console, run_dir: Path, run: AnalysedRun, *files: tuple[str, Path]) -> None:
    """Print the tables of a single run and the paths of its files."""
    summary, slo = run.summary, run.info.slo
    if "request_goodput" in summary and slo is not None:
        bounds = " ".join(f"{key}={bound:g}" for key, bound in to_mapping(slo).items() if bound is not None)
        console.print(f"goodput: {summary['request_goodput']:.2f} requests/s within {bounds}")
    show_tables(console, summary, run.fleet, run.causes)
    print_files(console, *files, ("report", run_dir / "report.html"))


def show_tables(
    console: Console, summary: dict[str, Any], fleet: Fleet | None = None, causes: Sequence[SizedCause] = ()
) -> None:
    """Print causes, latencies, idle time by cause (each if known), faults and stragglers."""
    from ..runtime.analysis.report.faults_section import fault_lines, straggler_lines
    from ..runtime.analysis.report.idle_table import bubble_table
    from ..runtime.analysis.report.run_tables import causes_table, latency_table

    if causes:
        console.print(causes_table(causes))
    if "requests" not in summary.get("unknown", ()):
        console.print(latency_table(summary))
    if fleet is not None and "bubble_fraction" in summary:
        console.print(bubble_table(fleet, causes))
    for line in (*fault_lines(summary), *straggler_lines(summary)):
        print_words(console, Text(line))


def show_first(console: Console, name: str, run: AnalysedRun) -> None:
    """Print a run's name, throughput and description."""
    print_throughput(console, name, run.summary)
    show_words(console, run.words)


def show_words(console: Console, words: Sequence[str]) -> None:
    """Print the sentences that describe a run, the first one bold."""
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
    """Print the comparison; write its numbers to the file `name`, and its report."""
    from ..runtime.analysis.report.comparison_table import comparison_table
    from ..runtime.analysis.report.run_groups import RunGroup
    from ..runtime.analysis.report.write_comparison import write_comparison
    from ..runtime.core.whole_file import write_text

    runs: dict[str, list[RunFolder]] = {}
    for turn, folder in zip(plan, folders, strict=True):
        runs.setdefault(turn.label, []).append(folder)
    candidates = [RunGroup(label, of_label) for label, of_label in runs.items()]
    comparison, _ = write_comparison(run_dir, candidates)
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
    """Replace infinities, which JSON lacks, by `"inf"`."""
    if isinstance(value, dict):
        return {key: plain(below) for key, below in value.items()}
    if isinstance(value, list):
        return [plain(below) for below in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value
