"""`gapless diff BASE RUN`: what differs between two runs, and which cause, stage and requests that shows in."""

from __future__ import annotations

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
    from ..runtime.analysis.report.run_groups import RunGroup

NEW_FOLDER = "difference"
BASE, RUN = "BASE", "RUN"  # names of the two runs


def prepare(config: DiffConfig, stdin: StandardInput) -> list[RunGroup]:
    """Check and read the folders before anything is written: a run and its repeats of each.

    Raises:
        ConfigError: not two folders, one that is no run's and holds none or several settings, an `out` that is a file.
    """
    from ..runtime.analysis.report.run_groups import RunGroup, group_runs

    if len(config.runs) != 2:
        number = len(config.runs) or "none"
        raise ConfigError(f"runs: give two run folders, not {number}, as in gapless diff runs/first runs/second")
    sides = []
    for name, text in zip((BASE, RUN), config.runs, strict=True):
        found = folders([text])
        groups = group_runs(found)
        if len(groups) > 1:
            labels = ", ".join(group.label for group in groups[:3]) + (", ..." if len(groups) > 3 else "")
            raise ConfigError(
                f"{text}: holds runs of {len(groups)} settings ({labels}); give the folder of one of them"
            )
        sides.append(RunGroup(name, found))
    if config.out is not None:
        check_folder(user_path(config.out, "out"), "out")
    return sides


def run(config: DiffConfig, sides: list[RunGroup], run_dir: Path) -> None:
    """Write the comparison of the two, and print their difference as text.

    Raises:
        ValueError: what the user can mend; a damaged run folder too.
    """
    from ..runtime.analysis.report.difference.difference_tables import difference_tables
    from ..runtime.analysis.report.difference.difference_words import changed_words, makespan_words
    from ..runtime.analysis.report.verdict import verdict
    from ..runtime.analysis.report.write_comparison import write_comparison

    path = user_path(config.out, "out") if config.out is not None else new_folder(user_path(config.runs[1]), NEW_FOLDER)
    _, difference = write_comparison(path, sides, figures=False)
    assert difference is not None
    console = Console(highlight=False)
    for side in sides:
        of = f", the median of {len(side.runs)} runs" if len(side.runs) > 1 else ""
        folder = side.median_run
        print_words(console, Text.assemble((f"{side.label:5}", "bold"), f"{folder.title} ({shown(folder.path)}{of})"))
    for sentences in ([changed_words(difference)], makespan_words(difference), verdict(sides)):
        if sentences:
            print_words(console, Text(" ".join(sentences)))
    console.print(*difference_tables(difference), sep="\n")
    print_files(console, ("numbers", path / "comparison.json"), ("report", path / "report.html"))
