"""What an experiment leaves: the paper's numbers beside ours, charts, and what there is to say of them."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from ...conf.schema import SimulateConfig
from ..core.run_record import RunRecord
from ..report.chart import Chart
from ..report.png import write_figures

Relation = Literal["=", "<=", ">="]
# A simulation of a config, named for who watches: a record of each replica. The command line draws its progress.
Simulate = Callable[[SimulateConfig, str], Sequence[RunRecord]]


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity, unit in its name.

    `paper` is the number that the paper's text or tables give, None where they give none (the row then stands beside
    the others for comparison). `relation` says whether that is the number itself or what ours may at most or must at
    least be; the quantity's name says so too.
    """

    artifact: str  # "Table 2", "Figure 12"
    quantity: str
    setting: str
    paper: float | None
    ours: float
    relation: Relation = "="

    @property
    def deviation(self) -> float | None:
        """Ours over the paper's, less 1; 0 within its bound."""
        if self.paper is None:
            return None
        off = self.ours / self.paper - 1.0
        return max(0.0, off) if self.relation == "<=" else min(0.0, off) if self.relation == ">=" else off


@dataclass(frozen=True, slots=True)
class Artifact:
    """One figure or table of the paper, reproduced. `notes` are paragraphs in Markdown: how it was run, where and why
    ours differs."""

    title: str
    rows: tuple[Row, ...]
    charts: tuple[Chart, ...] = ()
    notes: tuple[str, ...] = ()


def write_artifact(folder: Path, artifact: Artifact) -> list[Path]:
    """`paper.json`, `paper.md` and a PNG a chart into `folder`; the PNGs' paths."""
    rows = [asdict(row) for row in artifact.rows]
    (folder / "paper.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    figures = write_figures(folder, artifact.charts)
    (folder / "paper.md").write_text(_page(artifact, [path.name for path in figures]), encoding="utf-8")
    return figures


def number(value: float | None) -> str:
    """Three digits that count, or more; a dash for None."""
    if value is None:
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}" if abs(value) >= 1 else f"{value:#.3g}"


def cells(row: Row) -> tuple[str, ...]:
    """A row's texts: quantity, setting, paper, ours, deviation."""
    sign = {"=": "", "<=": "≤ ", ">=": "≥ "}[row.relation] if row.paper is not None else ""
    deviation = "-" if row.deviation is None else f"{row.deviation:+.1%}"
    if row.relation != "=" and row.deviation == 0.0:
        deviation = "holds"
    return row.quantity, row.setting, sign + number(row.paper), number(row.ours), deviation


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column of `rows` is text, the others are numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _page(artifact: Artifact, figures: Sequence[str]) -> str:
    lines = [f"## {artifact.title}", ""]
    lines += ["| quantity | setting | paper | ours | deviation |", "| --- | --- | ---: | ---: | ---: |"]
    lines += [f"| {' | '.join(cells(row))} |" for row in artifact.rows]
    for note in artifact.notes:
        is_table = note.startswith("|")
        lines += ["", note if is_table else textwrap.fill(note, 120, break_on_hyphens=False, break_long_words=False)]
    for name, chart in zip(figures, (c for c in artifact.charts if not c.is_empty), strict=True):
        lines += ["", f"![{chart.title}]({name})"]
    return "\n".join(lines) + "\n"
