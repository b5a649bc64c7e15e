"""A row of the table: one quantity, with the paper's number or the goal beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from gapless.runtime.experiments.artifact import Relation, number
from gapless.runtime.experiments.artifact import Row as PaperRow

Status = Literal["ok", "FAIL", "skip", "met", "missed", ""]
HEAD = ("part", "quantity", "setting", "value", "paper, A6000", "goal", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One quantity that a part found.

    Attributes:
        part: The part that found it.
        quantity: What it is, with its unit.
        setting: The setting that it is of.
        value: The number; None where there is none.
        paper: The paper's number, of LLaMA-13B on an A6000.
        goal: The number to reach.
        relation: Whether `value` must be at least (`>=`) or at most (`<=`) the goal or the paper's number.
        status: `ok` or `FAIL` of a check, `met` or `missed` of a goal, `skip` where something did not run, else empty.
        note: What else there is to say, as an error's text.
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
        paper, goal = ("" if n is None else sign + number(n) for n in (self.paper, self.goal))
        value = "" if self.value is None else number(self.value)
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
    """Make rows of an experiment's rows."""
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


def table(rows: Sequence[Row]) -> str:
    """Write the rows as one table."""
    lines = [HEAD, *(row.cells for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    is_number = [3 <= column <= 5 for column in range(len(HEAD))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, is_number, strict=True)
        ).rstrip()
        for line in lines
    )


def json_tables(rows: Iterable[Row]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows by part, for `benchmarks/support/results.py`."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        columns = asdict(row)
        tables.setdefault(columns.pop("part"), []).append(columns)
    return tables
