"""Rows of the result table: one quantity each, with the paper's number or a goal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ..paper.artifact import Relation, number
from ..paper.artifact import Row as PaperRow

Status = Literal["ok", "FAIL", "skip", "met", "missed", ""]
HEAD = ("part", "quantity", "setting", "value", "paper, A6000", "goal", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One quantity measured by a part.

    Attributes:
        part: The part.
        quantity: The quantity, with its unit.
        setting: The setting.
        value: The number, or None.
        paper: The paper's number, of LLaMA-13B on an A6000.
        goal: The number to reach.
        relation: Whether `value` must be at least (`>=`) or at most (`<=`) the goal or the paper's number.
        status: `ok` or `FAIL` of a check, `met` or `missed` of a goal, `skip` if something did not run, else empty.
        note: A remark, e.g. an error's text.
    """

    part: str
    quantity: str
    setting: str = ""
    value: float | None = None
    paper: float | None = None
    goal: float | None = None
    relation: Relation = "="
    status: Status = ""
    note: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as text, under `HEAD`."""
        sign = {"=": "", "<=": "≤ ", ">=": "≥ "}[self.relation]
        paper, goal = (
            "" if n is None else sign + (f"{n:,}" if isinstance(n, int) else number(n)) for n in (self.paper, self.goal)
        )
        value = "" if self.value is None else f"{self.value:,}" if isinstance(self.value, int) else number(self.value)
        return self.part, self.quantity, self.setting, value, paper, goal, f"{self.status} {self.note}".strip()


def checked(part: str, quantity: str, setting: str, error: float, tolerance: float) -> Row:
    """Make the row of a check: `error` must be at most `tolerance`."""
    status: Status = "ok" if error <= tolerance else "FAIL"
    return Row(part=part, quantity=quantity, setting=setting, value=error, goal=tolerance, relation="<=", status=status)


def aimed(part: str, quantity: str, setting: str, value: float, goal: float, relation: Relation = ">=") -> Row:
    """Make the row of a goal."""
    is_met = value >= goal if relation == ">=" else value <= goal
    return Row(
        part=part,
        quantity=quantity,
        setting=setting,
        value=value,
        goal=goal,
        relation=relation,
        status="met" if is_met else "missed",
    )


def of_paper(part: str, rows: Iterable[PaperRow], note: str = "") -> list[Row]:
    """Convert an experiment's rows."""
    return [
        Row(
            part=part,
            quantity=row.quantity,
            setting=row.setting,
            value=row.ours,
            paper=row.paper,
            relation=row.relation,
            note=note,
        )
        for row in rows
    ]


def figure(part: str, quantity: str, setting: str, value: float) -> Row:
    """Make the row of a number without a requirement."""
    return Row(part=part, quantity=quantity, setting=setting, value=value)


def missing(part: str, quantity: str, setting: str, reason: str) -> Row:
    """Make the FAIL row of something required but missing."""
    return Row(
        part=part,
        quantity=quantity,
        setting=setting,
        status="FAIL",
        note=(reason.splitlines() or ["no reason"])[0][:160],
    )


def table(rows: Sequence[Row]) -> str:
    """Format the rows as a table without empty columns."""
    lines = [HEAD, *(row.cells for row in rows)]
    filled = [column for column in range(len(HEAD)) if any(row.cells[column] for row in rows)]
    widths = {column: max(len(line[column]) for line in lines) for column in filled}
    return "\n".join(
        "  ".join(
            line[column].rjust(widths[column]) if 3 <= column <= 5 else line[column].ljust(widths[column])
            for column in filled
        ).rstrip()
        for line in lines
    )


def summary(rows: Sequence[Row]) -> str:
    """Count passed and failed checks, goals and figures, in one line."""
    words = {"ok": "passed", "FAIL": "failed", "met": "goals met", "missed": "goals missed", "skip": "skipped"}
    counts = {word: sum(row.status == status for row in rows) for status, word in words.items()}
    counts["figures"] = sum(not row.status for row in rows)
    return ", ".join(f"{count} {word}" for word, count in counts.items() if count or word in ("passed", "failed"))


def json_tables(rows: Iterable[Row]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows by part, for `benchmarks/support/results.py`."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        columns = asdict(row)
        tables.setdefault(columns.pop("part"), []).append(columns)
    return tables


def page(numbers: Path, rows: Sequence[Row]) -> str:
    """Return the page of a result; `numbers` is its JSON file from `benchmarks/support/results.py`."""
    result = json.loads(numbers.read_text(encoding="utf-8"))
    (measurement,) = result["measurements"]
    when = f"Measured {measurement['date']} at commit `{measurement['commit']}` on {measurement['machine']}."
    return (
        f"# `{result['command']}`\n\n{when}\n{summary(rows)}. Numbers: [{numbers.name}]({numbers.name}).\n\n"
        f"```text\n{table(rows)}\n```\n"
    )
