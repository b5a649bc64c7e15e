"""Runs one experiment of the paper and prints its table."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from gapless.conf.schema import SimulateConfig
from gapless.launch.progress import Steps, print_files
from gapless.launch.turns import requests
from gapless.runtime.core.run_record import RunRecord
from gapless.runtime.simulation.cost.error import error_text
from gapless.runtime.simulation.pipeline.run import simulated
from gapless.runtime.simulation.pipeline.setting import make_setting

from . import EXPERIMENTS
from .artifact import Artifact, Row, cells, write_artifact


def run(name: str, config: SimulateConfig, folder: Path) -> Artifact:
    """Run an experiment, print its table, write `paper.json`, `paper.md` and the plots into `folder`, and return it."""
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    with Steps(errors, name) as steps:
        numbers = itertools.count()

        def simulate(varied: SimulateConfig, label: str) -> Sequence[RunRecord]:
            steps.update(label, next(numbers), None)
            setting = make_setting(varied)
            workload, _ = requests(varied, {varied.scheduler: setting.plan})
            return [replica.record for replica in simulated(setting, workload)]

        artifact = EXPERIMENTS[name](config, simulate)
    folder.mkdir(parents=True, exist_ok=True)
    figures = write_artifact(folder, artifact)
    console.print(table(artifact.title, artifact.rows))
    for note in artifact.notes:
        console.print(Markdown(note))
        console.print()
    console.print(Text(error_text(make_setting(config).error)), soft_wrap=True)
    print_files(console, ("numbers", folder / "paper.json"), *(("plot", figure) for figure in figures))
    return artifact


def table(title: str, rows: Sequence[Row]) -> Table:
    """Make the table that compares the paper's numbers with ours."""
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in ("quantity", "setting"):
        made.add_column(name)
    for name in ("paper", "ours", "deviation"):
        made.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        made.add_row(*map(Text, cells(row)))
    return made
