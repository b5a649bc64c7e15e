"""A terminal table that shows less on narrower consoles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement


@dataclass(frozen=True, slots=True)
class FittingTable:
    """The first of several tables that fits the console, else the last.

    `spare`: characters of width that a table can save by wrapping its texts.
    """

    tables: Sequence[Callable[[], RenderableType]]
    spare: int = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.update(max_width=10_000)
        for make in self.tables:
            table = make()
            if Measurement.get(console, wide, table).maximum - self.spare <= options.max_width:
                break
        yield table
