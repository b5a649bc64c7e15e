"""An Nsight Systems report that was exported to SQLite: its tables, as far as this version of nsys writes them.

Schema: docs.nvidia.com/nsight-systems, "SQLite Schema Reference". Tables are made only where there are rows for them,
and columns come and go between versions, so only what is there is asked for.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ...conf.errors import ConfigError

REPORTS = (".nsys-rep", ".qdrep", ".qdstrm")
EXPORTS = (".sqlite", ".sqlite3", ".db")
_HEADER = b"SQLite format 3\0"


class NsysExport:
    """One export, opened for reading only. Times in it are nanoseconds from the start of its session.

    Raises:
        ConfigError: not an export, or one without any table of Nsight Systems.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                header = file.read(len(_HEADER))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
        if header != _HEADER:
            raise ConfigError(f"{path}: not an SQLite file; make one by {export_command(path)}")
        self._connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        try:
            rows = self._connection.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')").fetchall()
            self.tables = {name: self._columns(name) for (name,) in rows}
        except sqlite3.Error as error:
            raise self.damaged(error) from error
        if "StringIds" not in self.tables:
            raise ConfigError(f"{path}: not exported by Nsight Systems: it has no table StringIds")

    def _columns(self, table: str) -> frozenset[str]:
        return frozenset(row[1] for row in self._connection.execute(f'PRAGMA table_info("{table}")'))

    def damaged(self, error: Exception) -> ConfigError:
        return ConfigError(f"{self.path}: damaged, or not exported by Nsight Systems ({error})")

    def has(self, table: str, *columns: str) -> bool:
        """Whether the table is there with these columns."""
        return self.tables.get(table, frozenset()).issuperset(columns) and table in self.tables

    def each(self, query: str) -> Iterator[Any]:
        """The rows of a query, one by one.

        Raises:
            ConfigError: the file is damaged.
        """
        try:
            yield from self._connection.execute(query)
        except sqlite3.Error as error:
            raise self.damaged(error) from error

    def rows(self, query: str) -> list[Any]:
        """All rows of a query.

        Raises:
            ConfigError: the file is damaged.
        """
        return list(self.each(query))

    def value(self, table: str, column: str, where: str = "1") -> Any:
        """The column of the first row that fits; None where there is none, or no such table or column."""
        if not self.has(table, column):
            return None
        rows = self.rows(f'SELECT "{column}" FROM "{table}" WHERE {where} LIMIT 1')
        return rows[0][0] if rows else None

    @property
    def started_ns(self) -> int | None:
        """When the session started, in nanoseconds since 1970 by its host; None where the export does not say."""
        found = self.value("TARGET_INFO_SESSION_START_TIME", "utcEpochNs")
        return int(found) if found is not None else None

    @property
    def host(self) -> str:
        """Name of the machine; empty where the export does not say."""
        if not self.has("TARGET_INFO_SYSTEM_ENV", "name", "value"):
            return ""
        return str(self.value("TARGET_INFO_SYSTEM_ENV", "value", "name = 'Hostname'") or "")

    def close(self) -> None:
        self._connection.close()


def export_command(report: Path) -> str:
    """The command that exports a report."""
    return f"nsys export --type sqlite --output {report.with_suffix('.sqlite').name} {report.name}"


def export_files(paths: Iterable[Path]) -> list[Path]:
    """The exports that `paths` are or hold.

    Raises:
        ConfigError: there is none; the line says what there is instead.
    """
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path}: no such file or folder")
        inside = [path] if path.is_file() else sorted(path.iterdir())
        exports = [file for file in inside if file.suffix in EXPORTS] or [path] * path.is_file()
        reports = [file for file in inside if file.suffix in REPORTS]
        if reports and (path.is_file() or not exports):
            raise ConfigError(f"{reports[0]}: a report of Nsight Systems; export it by {export_command(reports[0])}")
        if not exports:
            raise ConfigError(f"{path}: holds no export of Nsight Systems, which is an .sqlite file")
        found += exports
    return found
