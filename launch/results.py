"""The end of a comparison: its tables, `bench.json`, its report."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console
from rich.text import Text

from ..conf.build import to_mapping
from ..conf.schema import ComparisonConfig
from ..conf.workloads import SloConfig
from .advising import kept_advice, quick_advice
from .progress import print_words, shown, versions
from .turns import Turn

if TYPE_CHECKING:
    from ..runtime.core.run_record import RunRecord
    from ..runtime.cost.error import CostError
    from ..runtime.ledger.fleet import Fleet
    from ..runtime.run_folder.read import RunFolder
    from ..runtime.workload import Workload


def tell_cut(errors: Console, workload: Workload, context: int) -> None:
    """Print how many requests are cut to the `context`, where some are."""
    if workload.num_cut:
        cut = f"{workload.num_cut} of {len(workload)} requests were longer than the context of {context} tokens"
        errors.print(f"gapless: {cut}: cut to it", soft_wrap=True)


def write_counted(
    folder: Path, summary: dict[str, Any], config: ComparisonConfig, turn: Turn, cost_error: CostError | None = None
) -> dict[str, Any]:
    """Write `summary.json` alone, for a run that kept no record."""
    from ..runtime.run_folder.titles import title_of
    from ..runtime.run_folder.write import write_summary

    own = plain(_own(config, turn))
    return write_summary(
        folder, title_of(own), summary, config=own, versions=versions(), slo=config.slo,
        cost_error=cost_error.numbers if cost_error is not None else None,
    )  # fmt: skip


def write_turn(
    folder: Path,
    run: RunRecord | Fleet,
    config: ComparisonConfig,
    turn: Turn,
    cost_error: CostError | None = None,
    *,
    advised: bool = False,
) -> dict[str, Any]:
    """Write the run folder of one turn, or of a fleet, with its own config; return its summary.

    Args:
        cost_error: of a simulation, how far its stage times may be off; None: not known.
        advised: a run, not a fleet, is replayed for a short time with other settings.
    """
    from ..runtime.ledger.fleet import Fleet
    from ..runtime.report.write_folder import write_run_folder

    own = _own(config, turn)
    about: dict[str, Any] = {"config": plain(own), "versions": versions(), "slo": config.slo}
    if cost_error is not None:
        about["cost_error"] = cost_error.numbers
    if not isinstance(run, Fleet):
        about |= {"advise": quick_advice} if advised else {}
        summary = write_run_folder(folder, run, **about)
    elif len(run.records) == 1:
        summary = write_run_folder(folder, run.records[0], ledger=run.ledgers[0], **about)
    else:
        from ..runtime.report.write_fleet import write_fleet_folder

        summary = write_fleet_folder(folder, run, **about)
    if turn.folder:  # what hydra writes of a run that stands alone
        (folder / ".hydra").mkdir(exist_ok=True)
        text = yaml.safe_dump(own, sort_keys=False)
        (folder / ".hydra" / "config.yaml").write_text(text, encoding="utf-8")
    return summary


def _own(config: ComparisonConfig, turn: Turn) -> dict[str, Any]:
    """Return the config of one turn alone."""
    return to_mapping(replace(config, scheduler=turn.policy, policies=(), repeats=1))


def show_one(console: Console, run_dir: Path, summary: Mapping[str, Any], fleet: Fleet, slo: SloConfig) -> None:
    """Print a run that stands alone: in words, then its tables."""
    from ..runtime.report.run_words import words_of_fleet
    from ..runtime.report.terminal import bubble_table, fault_lines, latency_table, straggler_lines

    show_words(console, words_of_fleet(fleet, summary["config"], kept_advice(run_dir)))
    if "request_goodput" in summary:
        bounds = " ".join(f"{key}={bound:g}" for key, bound in to_mapping(slo).items() if bound is not None)
        console.print(f"goodput: {summary['request_goodput']:.2f} requests/s within {bounds}")
    console.print(latency_table(summary))
    console.print(bubble_table(fleet))
    for line in (*fault_lines(summary), *straggler_lines(summary)):
        print_words(console, Text(line))
    console.print(Text.assemble(("report   ", "bold"), shown(run_dir / "report.html")), soft_wrap=True)


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
    num_requests: int,
    num_cut: int,
    name: str = "bench.json",
) -> None:
    """Print the table, and write the numbers as `name` and the comparison's report."""
    from ..runtime.report.run_groups import RunGroup
    from ..runtime.report.terminal import comparison_table
    from ..runtime.report.write_comparison import write_comparison

    runs: dict[str, list[RunFolder]] = {}
    for turn, folder in zip(plan, folders, strict=True):
        runs.setdefault(turn.label, []).append(folder)
    candidates = [RunGroup(label, of_it) for label, of_it in runs.items()]
    comparison = write_comparison(run_dir, candidates)
    numbers = {
        "config": plain(to_mapping(config)),
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
    (run_dir / name).write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    console.print(comparison_table(candidates))
    for label, file in (("numbers", name), ("report", "report.html")):
        console.print(Text.assemble((f"{label:9}", "bold"), shown(run_dir / file)), soft_wrap=True)


def plain(value: Any) -> Any:
    """Replace infinities, which JSON has not, by `\"inf\"`."""
    if isinstance(value, dict):
        return {key: plain(below) for key, below in value.items()}
    if isinstance(value, list):
        return [plain(below) for below in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value
