"""The result of an experiment: the paper's numbers and ours, charts and notes."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from gapless.conf.schema import SimulateConfig
from gapless.runtime.analysis.drawing.chart import Chart
from gapless.runtime.analysis.drawing.png import write_figures
from gapless.runtime.core.run_record import RunRecord
from gapless.runtime.core.whole_file import write_text

Relation = Literal["=", "<=", ">="]
# Simulates a config and returns the record of each replica; the name is for the progress display.
Simulate = Callable[[SimulateConfig, str], Sequence[RunRecord]]


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity of a figure or table, in the paper and here.

    Attributes:
        artifact: The figure or table: "Table 2", "Figure 12".
        quantity: The quantity, with its unit.
        setting: The setting.
        paper: The paper's number, from its text or tables; None if they give none.
        ours: Our number.
        relation: Whether the paper's number is the value itself, or its upper (`<=`) or lower (`>=`) bound.
    """

    artifact: str
    quantity: str
    setting: str
    paper: float | None
    ours: float
    relation: Relation = "="

    @property
    def deviation(self) -> float | None:
        """Our number over the paper's, minus 1; 0 within the paper's bound; None if the paper gives none."""
        if self.paper is None:
            return None
        difference = self.ours / self.paper - 1.0
        if self.relation == "<=":
            return max(0.0, difference)
        return min(0.0, difference) if self.relation == ">=" else difference


@dataclass(frozen=True, slots=True)
class Artifact:
    """A figure or table of the paper, reproduced.

    Attributes:
        title: Its heading.
        rows: The compared quantities.
        charts: Its charts.
        notes: Paragraphs in Markdown: how it was run, where our numbers differ and why.
    """

    title: str
    rows: tuple[Row, ...]
    charts: tuple[Chart, ...] = ()
    notes: tuple[str, ...] = ()


def write_artifact(folder: Path, artifact: Artifact) -> list[Path]:
    """Write `paper.json`, `paper.md` and a PNG of each chart into `folder`; return the paths of the PNGs."""
    rows = [asdict(row) for row in artifact.rows]
    write_text(folder / "paper.json", json.dumps(rows, indent=2) + "\n")
    figures = write_figures(folder, artifact.charts)
    write_text(folder / "paper.md", _page(artifact, [path.name for path in figures]))
    return figures


def number(value: float | None) -> str:
    """Write a number with at least three significant digits; a dash for None."""
    if value is None:
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}" if abs(value) >= 1 else f"{value:#.3g}"


def cells(row: Row) -> tuple[str, ...]:
    """Return a row as text: quantity, setting, paper, ours, deviation."""
    sign = {"=": "", "<=": "≤ ", ">=": "≥ "}[row.relation] if row.paper is not None else ""
    deviation = "-" if row.deviation is None else f"{row.deviation:+.1%}"
    if row.relation != "=" and row.deviation == 0.0:
        deviation = "holds"
    return row.quantity, row.setting, sign + number(row.paper), number(row.ours), deviation


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """Write a Markdown table. The first `texts` columns are text, the others are numbers."""
    lines = [head, [*["---"] * texts, *["---:"] * (len(head) - texts)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _page(artifact: Artifact, figures: Sequence[str]) -> str:
    """Write an artifact as Markdown; `figures` are the file names of its charts."""
    head = ("quantity", "setting", "paper", "ours", "deviation")
    lines = [f"## {artifact.title}", "", markdown_table(head, [cells(row) for row in artifact.rows], texts=2)]
    for note in artifact.notes:
        is_table = note.startswith("|")
        lines += ["", note if is_table else textwrap.fill(note, 120, break_on_hyphens=False, break_long_words=False)]
    for name, chart in zip(figures, (c for c in artifact.charts if not c.is_empty), strict=True):
        lines += ["", f"![{chart.title}]({name})"]
    return "\n".join(lines) + "\n"
