"""`gapless simulate experiment=paper/NAME`: simulates a figure or table of the paper, beside the paper's numbers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..conf.schema import SimulateConfig
from .progress import Steps, print_files
from .turns import requests

if TYPE_CHECKING:
    from ..runtime.core.run_record import RunRecord
    from ..runtime.experiments import Row
    from ..runtime.simulation.setting import Setting
    from ..runtime.workload import Workload


def check(config: SimulateConfig) -> None:
    """Check an experiment before it starts.

    Raises:
        ConfigError: there is no such experiment, it does not use a given key, or memory or hardware is wrong.
    """
    from ..runtime.experiments import check_experiment

    check_experiment(config)
    _prepare(config)


def run(config: SimulateConfig, run_dir: Path) -> None:
    """Run an experiment, print its table, and write `paper.json`, `paper.md` and the plots into `run_dir`.

    Raises:
        ValueError: what the user can correct.
        PipelineError: a request was lost.
    """
    from rich.markdown import Markdown

    from ..runtime.cost.error import error_text
    from ..runtime.experiments import EXPERIMENTS, write_artifact
    from ..runtime.simulation.setting import make_setting

    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    assert config.experiment is not None
    with Steps(errors, config.experiment) as steps:
        numbers = itertools.count()

        def simulate(varied: SimulateConfig, name: str) -> Sequence[RunRecord]:
            steps.update(name, next(numbers), None)
            return _records(varied)

        artifact = EXPERIMENTS[config.experiment](config, simulate)
    figures = write_artifact(run_dir, artifact)
    console.print(table(artifact.title, artifact.rows))
    for note in artifact.notes:
        console.print(Markdown(note))
        console.print()
    console.print(Text(error_text(make_setting(config).error)), soft_wrap=True)
    print_files(console, ("numbers", run_dir / "paper.json"), *(("plot", figure) for figure in figures))


def table(title: str, rows: Sequence[Row]) -> Table:
    """Make the table of the paper's numbers beside ours."""
    from ..runtime.experiments import cells

    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in ("quantity", "setting"):
        made.add_column(name)
    for name in ("paper", "ours", "deviation"):
        made.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        made.add_row(*map(Text, cells(row)))
    return made


def _prepare(config: SimulateConfig) -> tuple[Setting, Workload]:
    """Make the setting and the requests of one simulation."""
    from ..runtime.simulation.setting import make_setting

    setting = make_setting(config)
    return setting, requests(config, {config.scheduler: setting.plan})[0]


def _records(config: SimulateConfig) -> list[RunRecord]:
    """Simulate one config and return the record of each replica."""
    from ..runtime.simulation.run import simulated

    return [replica.record for replica in simulated(*_prepare(config))]
