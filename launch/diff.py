"""`gapless diff BASE RUN`: what differs between two runs, and which cause, stage and requests that shows in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ..conf.difference import DiffConfig
from ..conf.errors import ConfigError
from ..conf.user_path import user_path
from .output_path import check_folder, new_folder
from .progress import print_files, print_words, shown
from .prompts import StandardInput
from .report import folders

if TYPE_CHECKING:
    from ..runtime.run_folder.read import RunFolder

NEW_FOLDER = "difference"

Sides = tuple[Sequence["RunFolder"], Sequence["RunFolder"]]  # the base run and its repeats, the other and its own


def prepare(config: DiffConfig, stdin: StandardInput) -> Sides:
    """Check and read the folders before anything is written.

    Raises:
        ConfigError: not two folders, one that is no run's and holds none or several settings, an `out` that is a file.
    """
    if len(config.runs) != 2:
        number = len(config.runs) or "none"
        raise ConfigError(f"runs: give two run folders, not {number}, as in gapless diff runs/first runs/second")
    base, run = (_side(text) for text in config.runs)
    if config.out is not None:
        check_folder(user_path(config.out, "out"), "out")
    return base, run


def run(config: DiffConfig, sides: Sides, run_dir: Path) -> None:
    """Write the difference, and print it as text.

    Raises:
        ValueError: what the user can mend; a damaged run folder too.
    """
    from ..runtime.difference.difference_terminal import makespan_table, request_table, tail_table
    from ..runtime.difference.difference_words import paragraphs
    from ..runtime.difference.run_difference import BASE, RUN, RunDifference
    from ..runtime.difference.write_difference import NUMBERS, PAGE, write_difference

    difference = RunDifference(*sides)
    path = user_path(config.out, "out") if config.out is not None else new_folder(user_path(config.runs[1]), NEW_FOLDER)
    write_difference(path, difference)
    console = Console(highlight=False)
    for name, folder, repeats in zip((BASE, RUN), difference.folders, difference.repeats, strict=True):
        of = f", the median of {repeats} runs" if repeats > 1 else ""
        print_words(console, Text.assemble((f"{name:5}", "bold"), f"{folder.title} ({shown(folder.path)}{of})"))
    for sentences in paragraphs(difference):
        if sentences:
            print_words(console, Text(" ".join(sentences)))
    console.print(makespan_table(difference.makespan))
    if difference.tails:
        console.print(tail_table(difference.tails))
    console.print(request_table(difference.requests))
    print_files(console, ("numbers", path / NUMBERS), ("report", path / PAGE))


def _side(text: str) -> list[RunFolder]:
    """Read a run and its repeats."""
    from ..runtime.report.run_groups import group_runs

    found = folders([text])
    groups = group_runs(found)
    if len(groups) > 1:
        labels = ", ".join(group.label for group in groups[:3]) + (", ..." if len(groups) > 3 else "")
        raise ConfigError(f"{text}: holds runs of {len(groups)} settings ({labels}); give the folder of one of them")
    return found
