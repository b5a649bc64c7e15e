"""A table of numpy columns with notebook display and conversion to pandas and polars."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ....conf.errors import ConfigError, nearest
from ...core.numbers import counted
from ..drawing.text_table import TextTable

if TYPE_CHECKING:
    import pandas
    import polars

Column = npt.NDArray[Any]
_SHOWN_ROWS = 10


class Table(Mapping[str, Column]):
    """Columns of equal length by name: `table["begin"]` is a numpy array.

    Missing numbers are NaN, missing texts are empty.

    Args:
        name: name of the rows, such as `spans`.
        columns: the arrays, in the order of the data frame's columns.
    """

    def __init__(self, name: str, columns: Mapping[str, Column]) -> None:
        self.name = name
        self._columns = dict(columns)
        assert len({len(column) for column in columns.values()}) == 1, "columns of one table are of one length"

    def __getitem__(self, column: str) -> Column:
        if column not in self._columns:
            raise ConfigError(f"{self.name}[{column!r}]: no such column{nearest(column, self._columns)}")
        return self._columns[column]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __contains__(self, column: object) -> bool:
        return column in self._columns

    def __len__(self) -> int:
        """Return the number of columns, as for any mapping; `num_rows` counts rows."""
        return len(self._columns)

    @property
    def num_rows(self) -> int:
        """The length of each column."""
        return len(next(iter(self._columns.values())))

    def pandas(self) -> pandas.DataFrame:
        """Return the table as a pandas data frame.

        Raises:
            ConfigError: pandas is not installed.
        """
        frame: pandas.DataFrame = _package("pandas").DataFrame(self._columns)
        return frame

    def polars(self) -> polars.DataFrame:
        """Return the table as a polars data frame.

        Raises:
            ConfigError: polars is not installed.
        """
        frame: polars.DataFrame = _package("polars").DataFrame(self._columns)
        return frame

    def __repr__(self) -> str:
        return f"{self.name}: {counted(self.num_rows, 'row')} of {', '.join(self._columns)}"

    def _repr_html_(self) -> str:
        """Return the first rows, for notebooks."""
        texts = [[_text(value) for value in column[:_SHOWN_ROWS].tolist()] for column in self._columns.values()]
        shown = min(self.num_rows, _SHOWN_ROWS)
        note = f"{self.name}: {shown} of {self.num_rows:,} rows" if shown < self.num_rows else self.name
        return f"<p>{note}</p>{TextTable(tuple(self._columns), list(zip(*texts, strict=True))).html()}"


def table_of_rows(name: str, columns: list[str], rows: list[list[Any]]) -> Table:
    """Build a table from rows; None becomes NaN among numbers, and an empty text among texts."""
    return Table(name, {column: _array([row[place] for row in rows]) for place, column in enumerate(columns)})


def joined_tables(tables: list[Table], column: str) -> Table:
    """Concatenate tables with the same columns; the new first column `column` is the table index of each row."""
    numbers = np.repeat(np.arange(len(tables)), [table.num_rows for table in tables])
    joined = {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}
    return Table(tables[0].name, {column: numbers, **joined})


def _array(values: list[Any]) -> Column:
    if any(isinstance(value, str) for value in values):
        return np.array(["" if value is None else value for value in values], np.str_)
    if any(value is None or isinstance(value, float) for value in values):
        return np.array([np.nan if value is None else value for value in values], np.float64)
    return np.array(values, np.int64)


def _text(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return "" if np.isnan(value) else f"{value:.6g}"


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"{name}: not installed; pip install {name}, or use the columns, which are numpy") from error
