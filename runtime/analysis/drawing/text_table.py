"""A table of text, shown alike by the terminal and by pages."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from .fitting_table import FittingTable

RowKind = Literal["", "group", "member", "root", "total"]
_LEAST_TEXT = 24  # characters to which a last column of text may be wrapped before columns are left out
_INDENTS = {"member": "  ", "root": "    "}
_STYLES = {"root": "dim", "total": "bold"}


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table of text.

    Attributes:
        heads: Headings of the columns.
        rows: The cells of each row.
        title: Its heading.
        left: Headings of left-aligned columns, which may be wrapped; the others are right-aligned. None: the first.
        optional: Headings of columns that a narrow terminal leaves out, the last one first.
        kinds: The kind of a row, by its number: a group, a member of it, the part of a root cause, the total.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    left: Sequence[str] | None = None
    optional: Sequence[str] = ()
    kinds: Mapping[int, RowKind] = field(default_factory=dict)

    def _is_text(self, column: int) -> bool:
        return column == 0 if self.left is None else self.heads[column] in self.left

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns, last = range(len(self.heads)), len(self.heads) - 1
        shown = [
            [n for n in columns if self.heads[n] not in self.optional[kept:]]
            for kept in range(len(self.optional), -1, -1)
        ]
        longest = max((len(row[last]) for row in self.rows), default=0) if self._is_text(last) else 0
        ways = [partial(self._terminal, each) for each in shown]
        tight = partial(self._terminal, shown[-1], is_tight=True)
        yield FittingTable([*ways, tight], max(0, longest - _LEAST_TEXT))

    def _terminal(self, columns: Sequence[int], *, is_tight: bool = False) -> Table:
        """Build the terminal's table of some columns; if `is_tight`, any column of text may be wrapped."""
        made = Table(title=self.title or None, title_justify="left")
        for n in columns:
            is_text = self._is_text(n)
            no_wrap = not is_text or not (is_tight or n == len(self.heads) - 1)
            made.add_column(
                Text(self.heads[n]), justify="left" if is_text else "right", no_wrap=no_wrap, overflow="fold"
            )
        for place, row in enumerate(self.rows):
            kind = self.kinds.get(place, "")
            if kind == "total":
                made.add_section()
            cells = [Text(_INDENTS.get(kind, "") + row[0]), *map(Text, row[1:])]
            made.add_row(*(cells[n] for n in columns), style=_STYLES.get(kind, ""))
        return made

    def html(self, css: str = "") -> str:
        """Render the table for a page, of class `css`; its title is the heading of a first column that has none."""

        def cell(tag: str, column: int, text: str) -> str:
            of_text = ' class="text"' if column > 0 and self._is_text(column) else ""
            return f"<{tag}{of_text}>{html.escape(text)}</{tag}>"

        heads = [self.heads[0] or self.title, *self.heads[1:]]
        head = "".join(cell("th", n, text) for n, text in enumerate(heads))
        lines = []
        for place, row in enumerate(self.rows):
            kind = f' class="{self.kinds[place]}"' if place in self.kinds else ""
            lines.append(f"<tr{kind}>{''.join(cell('td' if n else 'th', n, text) for n, text in enumerate(row))}</tr>")
        body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"
        return f'<div class="scroll"><table class="{css}">{body}</table></div>'
