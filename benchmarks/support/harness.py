"""Shared parts of the benchmark commands: options, interleaved runs, medians, tables, and the `--json` file.

A column's name ends with its unit, which determines how numbers are printed: `p99_ttft_s` is a column `p99 TTFT` in
seconds, `bubble_share` one in percent.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from gapless.launch.cli import main as gapless

from .results import write_json

K = TypeVar("K")
T = TypeVar("T")
Row = dict[str, Any]
_UNITS = {"_s": " s", "_ms": " ms", "_us": " us", "_share": "%"}
_DIGITS = 4  # of the largest number of a column
_SHORT = ("ttft", "tbt", "tpot", "kv", "cpu", "pd")


class Benchmark:
    """A benchmark command: its options, and its result rows, which `end` prints and writes.

    Args:
        doc: the docstring of the command's module, printed by `--help`.
        positional: positional arguments, each with its type or a dict of keywords for `add_argument`.
        overrides: whether `KEY=VALUE` overrides for gapless may follow.
        options: defaults by name. A list default makes a comma-separated option, False a flag; a dict holds keywords
            for `add_argument`.

    Attributes:
        given: the parsed options, with the overrides as the list `overrides`.
    """

    def __init__(
        self, doc: str | None, positional: Mapping[str, Any] | None = None, *, overrides: bool = False, **options: Any
    ) -> None:
        self.name = Path(sys.argv[0]).stem
        self.parser = argparse.ArgumentParser(
            f"python -m benchmarks.{self.name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        for name, kind in (positional or {}).items():
            self.parser.add_argument(name, **(kind if isinstance(kind, dict) else {"type": kind}))
        for name, default in options.items():
            self.parser.add_argument(f"--{name.replace('_', '-')}", **_option(default))
        self.parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file too")
        if overrides:
            self.parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for gapless")
        self.given = self.parser.parse_intermixed_args()
        self.tables: dict[str, list[Row]] = {}

    def row(self, table: str, **columns: Any) -> Row:
        """Add a row to a table, print it to standard error, and return it."""
        self.tables.setdefault(table, []).append(columns)
        say(f"{table}: " + ", ".join(f"{heading(key)} {_cells(key, [value])[0]}" for key, value in columns.items()))
        return columns

    def end(
        self,
        holds: bool = True,
        hidden: Iterable[str] = (),
        columns: Mapping[str, Sequence[str]] | None = None,
    ) -> int:
        """Print the tables except `hidden`, all or only `columns`; write all to `--json`; return the exit status."""
        for name, rows in self.tables.items():
            if name not in hidden:
                print(f"\n{name.replace('_', ' ')}\n{table(rows, (columns or {}).get(name, ()))}")
        write_json(self.given.json, self.name, self.tables)
        if not holds:
            say("FAILED")
        return 0 if holds else 1


def _option(default: Any) -> dict[str, Any]:
    if isinstance(default, dict):
        return default
    if isinstance(default, bool):
        return {"action": "store_true"}
    if isinstance(default, list):
        kind = type(default[0])
        return {"type": lambda text: [kind(word) for word in text.split(",")], "default": default, "metavar": "A,B,..."}
    return {"type": type(default), "default": default, "help": "%(default)s"}


def table(rows: Sequence[Row], columns: Sequence[str] = ()) -> str:
    """Format rows as a text table of all columns, or of `columns`."""
    keys = columns or list(dict.fromkeys(key for row in rows for key in row))
    cells = [[heading(key), *_cells(key, [row.get(key) for row in rows])] for key in keys]
    widths = [max(map(len, column)) for column in cells]
    is_text = [any(isinstance(row.get(key), str) for row in rows) for key in keys]
    justified = [
        [cell.ljust(width) if left else cell.rjust(width) for cell in column]
        for column, width, left in zip(cells, widths, is_text, strict=True)
    ]
    return "\n".join("  ".join(line).rstrip() for line in zip(*justified, strict=True))


def heading(key: str) -> str:
    words = key.removesuffix(_unit(key)).replace("_per_", "/").split("_")
    return " ".join(word.upper() if word in _SHORT else word for word in words)


def _unit(key: str) -> str:
    """Return the unit suffix of a column's name."""
    return next((end for end in _UNITS if key.endswith(end) and not key.endswith("_per_s")), "")


def _cells(key: str, values: Sequence[Any]) -> list[str]:
    """Format a column's values, with four significant digits of the largest number."""
    unit = _UNITS.get(_unit(key), "")
    scale = 100.0 if unit == "%" else 1.0
    numbers = [abs(scale * value) for value in values if isinstance(value, float) and math.isfinite(value)]
    whole = math.floor(math.log10(max(numbers, default=1.0) or 1.0)) + 1
    decimals = min(max(0, _DIGITS - max(1, whole)), 2 if unit == "%" else 3)

    def cell(value: Any) -> str:
        if value is None:
            return "-"
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, float):
            return f"{scale * value:,.{decimals}f}{unit}"
        return f"{value:,}{unit}" if isinstance(value, int) else str(value)

    return [cell(value) for value in values]


def say(*lines: str) -> None:
    for line in lines:
        print(line, file=sys.stderr, flush=True)


def by_turns(rounds: int, variants: Mapping[K, Callable[[], T]]) -> dict[K, list[T]]:
    """Call each variant once per round, in reverse order every other round; return the results by variant."""
    found: dict[K, list[T]] = {name: [] for name in variants}
    for number in range(rounds):
        for name in list(variants)[:: -1 if number % 2 else 1]:
            label = ", ".join(map(str, name)) if isinstance(name, tuple) else name
            say(f"round {number + 1} of {rounds}: {label}")
            found[name].append(variants[name]())
    return found


def spread(values: Iterable[float], unit: str = "s") -> dict[str, float]:
    """Return median, minimum and maximum as columns."""
    found = list(values)
    return {f"median_{unit}": statistics.median(found), f"least_{unit}": min(found), f"most_{unit}": max(found)}


def medians(rows: Sequence[Mapping[str, float]], *names: str) -> dict[str, float]:
    """Return the median of each column, or of the columns `names`."""
    return {name: statistics.median(row[name] for row in rows) for name in names or rows[0]}


_FIGURES = {
    "makespan_s": "duration",
    "tokens_per_s": "total_token_throughput",
    "requests_per_s": "request_throughput",
    "goodput_requests_per_s": "request_goodput",
    "bubble_share": "bubble_fraction",
    "inner_idle_share": "bubble_fraction_inner",
}


def figures(summary: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return values of a run's `summary.json` by column name, e.g. `makespan_s`, `p99_tbt_ms`, `p99_ttft_s`."""
    found = {}
    for name in names:
        key = _FIGURES.get(name) or name.replace("tbt", "itl").replace("e2e", "e2el")
        found[name] = summary[key] if key in summary else summary[key.removesuffix("_s") + "_ms"] / 1e3
    return found


def words(*texts: str) -> list[str]:
    """Split texts into `KEY=VALUE` words; a value may contain spaces."""
    return [word for text in texts for word in re.split(r"\s+(?=[+~]?[\w./]+=)", text)]


def run_gapless(*command: str) -> None:
    """Run a command of gapless in this process.

    Raises:
        SystemExit: it failed; it has printed why.
    """
    if code := gapless(list(command)):
        raise SystemExit(f"gapless {' '.join(command)} ended with {code}")


@contextmanager
def scratch() -> Iterator[Path]:
    """Context manager of a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="gl") as name:
        yield Path(name)
