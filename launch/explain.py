"""`gapless explain`: suggests improvements of a run by replaying its twin with changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console
from rich.text import Text

from ..conf.build import dotted_keys, load_group, unknown_key
from ..conf.errors import ConfigError
from ..conf.explaining import ExplainConfig
from ..conf.schema import SimulateConfig
from ..conf.user_path import user_path
from .output_path import check_folder
from .progress import Steps, print_files, print_words, shown
from .prompts import StandardInput
from .report import folders
from .results import show_words
from .run_command import command_writer

if TYPE_CHECKING:
    from ..runtime.analysis.run_folder.read import RunFolder

_CHANGEABLE = ("scheduler", "parallel", "cache")
_OF_SIMULATIONS = ("simulation", "hardware", "cluster")


@dataclass(frozen=True, slots=True)
class PreparedExplanation:
    """The run to explain, and the changes to try, each as values by dotted key."""

    folder: RunFolder
    tried: list[dict[str, Any]]


def prepare(config: ExplainConfig, stdin: StandardInput) -> PreparedExplanation:
    """Validate the folder and the changes before anything is replayed.

    Raises:
        ConfigError: no run folder, or several; a changed key that is unknown or cannot be replayed; `out` is a file.
    """
    from ..runtime.analysis.run_folder.titles import is_simulated

    if len(config.run) != 1:
        what = "give one run folder only" if config.run else "give the run folder"
        raise ConfigError(f"run: {what}, as in gapless explain runs/DATE_TIME")
    found = folders(config.run)
    if len(found) > 1:
        raise ConfigError(f"{config.run[0]}: has {len(found)} runs; give one of them, as {shown(found[0].path)}")
    if config.out is not None:
        check_folder(user_path(config.out, "out"), "out")
    simulated = is_simulated(found[0].config)
    return PreparedExplanation(found[0], list(_changes(config.changes, simulated=simulated)))


def run(config: ExplainConfig, prepared: PreparedExplanation, run_dir: Path) -> None:
    """Replay the run unchanged and with changes, print their effects, and write `explain.json`.

    Raises:
        ValueError: an error that the user can correct, such as a damaged run folder.
    """
    from ..runtime.analysis.explain import explanation_tables as tables
    from ..runtime.analysis.explain.analysed_run import AnalysedRun
    from ..runtime.analysis.explain.explain_json import write_explanation
    from ..runtime.analysis.explain.explain_run import explain
    from ..runtime.analysis.explain.twin import make_twin
    from ..runtime.analysis.ledger.fleet import Fleet
    from ..runtime.analysis.report.idle_table import bubble_table
    from ..runtime.analysis.report.run_tables import causes_table
    from ..runtime.analysis.run_folder.run_info import RunInfo

    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    folder = prepared.folder
    with Steps(errors, "explain") as steps:
        twin = make_twin(folder)
        explanation = explain(
            twin,
            seeds=config.seeds,
            objective=config.objective,
            tolerance=config.tolerance,
            seconds=config.seconds,
            tried=prepared.tried,
            command_of=command_writer(folder.config),
            on_progress=steps.update,
        )
    print_words(console, Text(folder.title, "bold"))
    print_words(console, Text(tables.error_line(explanation)))
    print_words(console, Text(tables.values_line(explanation)))
    fleet = Fleet([twin.base], ledgers=[twin.ledger])
    run = AnalysedRun(fleet, RunInfo(folder.config), lambda run: explanation)
    show_words(console, run.words)
    if explanation.causes:
        console.print(causes_table(explanation.causes))
    console.print(bubble_table(fleet, explanation.causes))
    if explanation.outcomes:
        console.print(tables.changes_table(explanation))
    if explanation.outcomes and (first := explanation.outcomes[0]).command is not None:
        what = "best" if explanation.best is not None else "no change certainly helps; the most promising one"
        console.print(Text(f"{what}:", "bold"))
        console.print(Text(f"  {first.command}"), soft_wrap=True)
        if first.note:
            print_words(console, Text(f"  with it, {first.note}"))
    searched = () if prepared.tried else tables.search_lines(explanation)
    for line in (*searched, *explanation.notes):
        print_words(console, Text(line))
    path = folder.path if config.out is None else user_path(config.out, "out")
    path.mkdir(parents=True, exist_ok=True)
    print_files(console, ("numbers", write_explanation(path, explanation)))


def _changes(overrides: Sequence[str], *, simulated: bool) -> Iterator[dict[str, Any]]:
    """Yield one change per combination of the override values.

    Raises:
        ConfigError: a key is unknown or cannot be replayed.
    """
    values = dict(_values(text, simulated=simulated) for text in overrides)
    for point in product(*values.values()) if values else ():
        change: dict[str, Any] = {}
        for key, value in zip(values, point, strict=True):
            if key == "parallel":
                grid = load_group("parallel", str(value))
                change |= {"parallel.pp": grid["pp"], "parallel.tp": grid["tp"]}
            else:
                change[key] = value
        yield change


def _values(text: str, *, simulated: bool) -> tuple[str, list[Any]]:
    key, is_set, value = text.partition("=")
    if not is_set:
        raise ConfigError(f"changes={text!r}: expected KEY=VALUE, such as scheduler.chunk=512")
    allowed = (*_CHANGEABLE, *_OF_SIMULATIONS) if simulated else _CHANGEABLE
    is_key = key in dict(dotted_keys(SimulateConfig))
    if key not in ("scheduler", "parallel") and not is_key:
        raise ConfigError(f"{key}: unknown key{unknown_key(SimulateConfig, key)}")
    if key.partition(".")[0] not in allowed:
        raise ConfigError(f"{key}: cannot be replayed; change keys of {', '.join(allowed[:-1])} or {allowed[-1]}")
    try:
        return key, yaml.safe_load(f"[{value or 'null'}]")
    except yaml.YAMLError:
        raise ConfigError(f"{text}: not valid YAML") from None
