"""`gapless tune`: finds the configuration of a model on a cluster with the highest request rate within an SLO."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from ..conf.build import to_mapping
from ..conf.schema import BenchConfig, recast
from ..conf.tuning import TuneConfig
from .capacity import SLO_NOT_MET, asked_text
from .overrides import command_line, overrides
from .progress import Steps, print_files, print_words, versions
from .prompts import StandardInput
from .results import plain

if TYPE_CHECKING:
    from ..runtime.pipeline.launcher import Launcher
    from ..runtime.simulation.tuning.search import Search
    from ..runtime.simulation.tuning.search_result import SearchResult


def prepare(config: TuneConfig, stdin: StandardInput) -> Search:
    """Validate a search before anything is simulated.

    Raises:
        ConfigError: a policy, the workload, the profile or the hardware is invalid, or the model fits on no grid.
    """
    from ..runtime.simulation.tuning.search import Search

    return Search(config)


def run(config: TuneConfig, search: Search, run_dir: Path, launcher: Launcher | None = None) -> int:
    """Search, print and write the results: `tune.json`, `report.html`, `figures/`. Return the exit code.

    Raises:
        ValueError: an error that the user can correct.
    """
    from ..runtime.analysis.drawing.png import write_figures
    from ..runtime.analysis.ledger.fleet import Fleet
    from ..runtime.analysis.ledger.summary import summarize
    from ..runtime.analysis.report.tuning import page, tables
    from ..runtime.analysis.report.tuning.charts import charts
    from ..runtime.core.whole_file import write_text
    from ..runtime.simulation.tuning.closest import unmet_note
    from ..runtime.simulation.tuning.error_range import rate_text

    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    with Steps(errors, "tune") as steps:

        def report(what: str, done: int, of: int, best: float) -> None:
            so_far = f", best {rate_text(best)} requests/s" if best else ""
            steps.update(f"{what}{so_far}", done, of)

        search.on_progress = report
        search.summarize = lambda records: summarize(Fleet(records))
        found = search.run()
    commands = _commands(search, found)
    devices = f"{config.nodes} x {config.cluster.devices_per_node} {config.hardware.name}"
    title = f"Simulated: gapless tune, {config.model.name} on {devices}"
    asked = asked_text(config, found.demands[0])
    subtitle = f"{asked} · {datetime.now():%Y-%m-%d %H:%M}"
    drawn = charts(found, config.slo)
    write_text(run_dir / "report.html", page.render(found, config, title, subtitle, commands))
    write_text(run_dir / "tune.json", json.dumps(_numbers(search, found, commands), indent=2) + "\n")
    write_figures(run_dir / "figures", drawn)

    console.print(Text(f"{title}: {asked}", "bold"), soft_wrap=True)
    for table in (
        tables.misfit_rows(found),
        tables.grid_rows(found),
        tables.chunk_rows(found),
        tables.finalist_rows(found.finalists),
        tables.closest_rows(found.closest),
    ):
        if table.rows:
            console.print(table)
    print_words(console, Text(page.tried_note(found)))
    notes = {"error": page.error_note(found)}
    if found.winner is None:
        print_words(console, Text(unmet_note(found.closest), "bold"))
    else:
        rate = rate_text(found.winner.interval.mean)
        best = f"{found.winner.candidate.label}: {rate} requests/s, {page.interval_note(found)}"
        notes = {"best": best, "ties": page.ties_note(found), **notes}
        if found.asked is not None:
            notes["asked"] = f"{rate_text(found.asked)} requests/s: {page.asked_note(found)}"
    for name, note in notes.items():
        if note:
            print_words(console, Text.assemble((f"{name:9}", "bold"), note))
    for what, command in commands.items():
        console.print(Text(f"{what}:", "bold"), soft_wrap=True)
        console.print(Text(f"  {command}"), soft_wrap=True)
    print_files(console, ("numbers", run_dir / "tune.json"), ("report", run_dir / "report.html"))
    return 0 if found.winner is not None else SLO_NOT_MET


def _commands(search: Search, found: SearchResult) -> dict[str, str]:
    """Return the commands that run the winner, by description."""
    winner = found.winner
    if winner is None:
        return {}
    config = search.space.config_of(winner.candidate)
    workload = search.demand.config_at(config.workload, winner.rate)
    simulated = {"simulates it at the first seed's rate": command_line(replace(config, workload=workload), "simulate")}
    share = workload
    if winner.candidate.replicas > 1:
        share = search.demand.config_at(config.workload, winner.rate / winner.candidate.replicas)
        if share.max_concurrency is not None:
            share = replace(share, max_concurrency=-(-share.max_concurrency // winner.candidate.replicas))
    real = recast(config, BenchConfig, workload=share)
    one = "one of its replicas" if winner.candidate.replicas > 1 else "it"
    return simulated | {f"runs {one} on the real devices": command_line(real, "bench")}


def _numbers(search: Search, found: SearchResult, commands: dict[str, str]) -> dict[str, Any]:
    """Return the contents of `tune.json`; rates are requests/s."""
    from ..runtime.analysis.report.tuning import page

    def finalist(number: int) -> dict[str, Any]:
        f = found.finalists[number]
        return {
            "setting": f.candidate.label,
            "overrides": overrides(search.space.config_of(f.candidate), "simulate"),
            **f.known,
            **f.numbers,
        }

    return {
        "config": plain(to_mapping(search.config)),
        "versions": versions(),
        "asked_rate": found.asked,
        "winner": finalist(0) if found.finalists else None,
        "ties": [tied.candidate.label for tied in found.ties],
        "ties_note": page.ties_note(found),
        "cost_error": None if found.error is None else found.error.numbers,
        "closest": [approach.numbers() for approach in found.closest],
        "commands": commands,
        "finalists": [finalist(number) for number in range(len(found.finalists))],
        "chunks": [
            {"chunk": candidate.chunk, "rate": capacity.rate, "limit": capacity.why}
            for candidate, capacity in found.chunks
        ],
        "misfits": [{"tp": m.tp, "pp": m.pp, "replicas": m.replicas, "why": m.why} for m in found.misfits],
        "tried": [
            {
                "setting": t.candidate.label,
                "reached": t.reached,
                "carried": t.low,
                "bound": t.bound.rate,
                "why": t.why,
                "p99_ttft_ms": t.low_trial.ttft_p99_ms if t.low_trial else None,
                "p99_tbt_ms": t.low_trial.tbt_p99_ms if t.low_trial else None,
                "requests": t.requests,
            }
            for t in found.tried
        ],
        "simulations": found.simulations,
        "requests": found.requests,
        "confirming_requests": found.confirming_requests,
    }
