"""Reads run folders."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ....conf.errors import ConfigError
from ....conf.units import with_present_names
from ...core.run_record import RunRecord
from ..ledger.fleet import Fleet
from .files import PREFILL_KEY, RECORD, REPLICAS_KEY, REQUIRED, SPANS, STAGE_TIMES, SUMMARY, replica_folder
from .record_jsonl import read_record
from .spans_csv import read_spans
from .stage_times_json import read_stage_times

_DAMAGE = (OSError, EOFError, ValueError, KeyError, IndexError, TypeError, zlib.error)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run on disk, or a fleet of runs.

    `summary` is `summary.json` as written. `load_fleet` returns the records, which may be large: from memory if the run
    has just been written, else from the files. A fleet's folder has a summary over all replicas, and contains their
    run folders.
    """

    path: Path
    summary: dict[str, Any]
    in_memory: Fleet | None = field(default=None, compare=False, repr=False)

    @property
    def title(self) -> str:
        """The title in `summary.json`; without one, the name of the folder."""
        return str(self.summary.get("title", self.path.name))

    @property
    def config(self) -> dict[str, Any]:
        """The run's composed config; empty if it was not recorded."""
        found = self.summary.get("config")
        return found if isinstance(found, dict) else {}

    @property
    def replicas(self) -> list[RunFolder]:
        """The runs of a fleet, by number; for a standalone run, the run itself.

        Raises:
            ConfigError: one of them is missing or damaged.
        """
        if REPLICAS_KEY not in self.summary:
            return [self]
        numbers = range(self.summary[REPLICAS_KEY])
        return [read_run_folder(self.path / replica_folder(number)) for number in numbers]

    def load(self) -> RunRecord:
        """Read the record; times are seconds from the run's start.

        Its `Ledger` equals the original run's within a nanosecond. The record is not cached.

        Raises:
            ConfigError: one of the files is damaged.
        """
        name = RECORD
        try:
            with gzip.open(self.path / name, "rb") as file:
                record = read_record(file)
            name = SPANS
            with gzip.open(self.path / name, "rt", newline="", encoding="utf-8") as text:
                record.spans = read_spans(text)
            name = STAGE_TIMES
            if (self.path / name).is_file():
                record.stage_weights = read_stage_times((self.path / name).read_bytes())
        except _DAMAGE as error:
            raise _damaged(self.path / name, error) from error
        return record


def read_run_folder(path: Path) -> RunFolder:
    """Return what `write_run_data` or `write_fleet_totals` wrote, without its record.

    Raises:
        ConfigError: not a run folder, or its summary is damaged.
    """
    for name in REQUIRED:
        if not (path / name).is_file() and not _is_fleet_folder(path):
            raise ConfigError(f"{path}: not a run folder: it has no {name}")
    try:
        summary = msgspec.json.decode((path / SUMMARY).read_bytes(), type=dict[str, Any])
        return RunFolder(path, summary | {"config": with_present_names(summary.get("config"))})
    except _DAMAGE as error:
        raise _damaged(path / SUMMARY, error) from error


def load_fleet(folder: RunFolder) -> Fleet:
    """Return the replicas of a fleet's folder; for a run folder, the run as a fleet of one.

    Raises:
        ConfigError: one of the files is damaged.
    """
    if folder.in_memory is not None:
        return folder.in_memory
    replicas = folder.replicas
    starts = folder.summary.get("replica_starts", [0.0] * len(replicas))
    records = [replica.load() for replica in replicas]
    return Fleet(records, starts, num_prefill=folder.summary.get(PREFILL_KEY, 0))


def is_run_folder(path: Path) -> bool:
    """Return whether the folder is a run folder or a fleet's folder."""
    return all((path / name).is_file() for name in REQUIRED) or _is_fleet_folder(path)


def _is_fleet_folder(path: Path) -> bool:
    replica = path / replica_folder(0)
    return (path / SUMMARY).is_file() and all((replica / name).is_file() for name in REQUIRED)


def with_infinities(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config read from JSON with its "inf" strings converted to infinity, which JSON lacks."""

    def restored(value: Any) -> Any:
        return with_infinities(value) if isinstance(value, dict) else math.inf if value == "inf" else value

    return {key: restored(value) for key, value in config.items()}


def _damaged(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path}: damaged, or not written by gapless ({error})")
