"""The folder that a run leaves: tables, summary and trace; and how it is read back."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from ...conf.errors import ConfigError
from ...conf.workloads import SloConfig
from ..core.features import FEATURES
from ..core.garbage_collection import without_collector
from ..core.messages import Span
from ..core.micro_batch_columns import values_at
from ..core.request_record import RequestRecord
from ..core.run_record import Blocked, DecodesRecord, MicroBatchRecord, RunRecord, SegmentRecord, Wait
from ..ledger.fleet import Fleet
from ..ledger.ledger import CAUSES, Ledger
from ..ledger.summary import has_bound, request_row, summarize
from .gzip_stream import GzipStream
from .text_columns import csv as csv_text
from .text_columns import decimals, integers, names, nanoseconds
from .trace import write_trace

T = TypeVar("T")

SPAN_COLUMNS = (
    *("step", "stage", "ready", "input", "begin", "end", "sent", "dispatched"),  # seconds from the run's start
    *("prefill_tokens", "decode_tokens", "decode_context", "chunk_prefix"),  # chunk_prefix: summed over the chunks
    *("idle_before_ms", "idle_cause"),  # the cause of the largest part
    "predicted_ms",  # what the scheduler foresaw of end - begin; empty where it did not
)
FILES = ("summary.json", "record.jsonl.gz", "spans.csv.gz")  # what makes a folder a run folder
FLEET = "replicas"  # the key of a fleet's summary that says how many run folders lie inside it
_ROWS = 1 << 16  # of spans.csv.gz at a time
_DAMAGE = (OSError, EOFError, ValueError, KeyError, IndexError, TypeError, zlib.error)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run on disk. `summary` is `summary.json` as written; the record, which may be large, is read by `load`.

    A fleet's has a summary of all its replicas, and their run folders inside (`fleet_folder.py`)."""

    path: Path
    summary: dict[str, Any]

    @property
    def title(self) -> str:
        return str(self.summary.get("title", self.path.name))

    @property
    def config(self) -> dict[str, Any]:
        """The run's config as it was composed; empty where it was not recorded."""
        found = self.summary.get("config")
        return found if isinstance(found, dict) else {}

    @property
    def replicas(self) -> list[RunFolder]:
        """The runs of a fleet, by number; a run that stands alone is its own.

        Raises:
            ConfigError: one of them is missing or damaged.
        """
        if FLEET not in self.summary:
            return [self]
        return [read_run_folder(self.path / replica_folder(number)) for number in range(self.summary[FLEET])]

    def load(self) -> RunRecord:
        """The record, times in seconds from the run's start; it is not kept. `Ledger` of it is the ledger that the
        run had, within a nanosecond.

        Raises:
            ConfigError: one of the files is damaged.
        """
        name = "record.jsonl.gz"
        try:
            with gzip.open(self.path / name, "rb") as file:
                record = _read_lines(file)
            name = "spans.csv.gz"
            with gzip.open(self.path / name, "rt", newline="", encoding="utf-8") as text:
                record.spans = _read_spans(text)
            name = "stage_times.json"
            if (self.path / name).is_file():
                record.stage_times = msgspec.json.decode((self.path / name).read_bytes(), type=_StageTimes).weights
        except _DAMAGE as error:
            raise _damaged(self.path / name, error) from error
        return record


def write_summary(
    path: Path,
    title: str,
    numbers: Mapping[str, Any],
    *,
    config: Mapping[str, Any],
    versions: Mapping[str, str] | None = None,
    slo: SloConfig | None = None,
) -> dict[str, Any]:
    """Write `summary.json` into `path` (made if need be): `numbers`, and of what run they are; return what it holds."""
    summary = {
        "title": title,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        **numbers,
        "config": dict(config) | ({"slo": asdict(slo)} if slo is not None and has_bound(slo) else {}),
        "versions": dict(versions or {}),
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


@without_collector()
def write_run_data(
    path: Path,
    record: RunRecord,
    *,
    config: Mapping[str, Any],
    versions: Mapping[str, str] | None = None,
    title: str | None = None,
    slo: SloConfig | None = None,
    ledger: Ledger | None = None,
) -> dict[str, Any]:
    """Write the run's files into `path` (made if need be) and return what `summary.json` holds.

    Files: requests.csv, spans.csv.gz, record.jsonl.gz (the rest of the record: micro-batches with their waits, token
    times), summary.json, trace.json.gz; stage_times.json where the scheduler learned them. `title` is by
    default made of the config's model and scheduler; with `slo` the summary has `request_goodput`. `ledger` is the
    record's, where it has been made; its conservation is checked first.
    """
    ledger = ledger or Ledger(record)
    ledger.check()
    title = title or title_of(config)
    summary = write_summary(path, title, summarize(record, ledger, slo), config=config, versions=versions, slo=slo)
    rows = [request_row(request, ledger) for request in record.requests]
    with (path / "requests.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(request_row(RequestRecord(0, 0, 0.0), ledger))
        writer.writerows(row.values() for row in rows)
    encode = msgspec.json.Encoder().encode_lines
    with GzipStream(path / "spans.csv.gz") as stream:
        for lines in _span_lines(record, ledger):
            stream.write(lines)
    with GzipStream(path / "record.jsonl.gz") as stream:
        for batch in _batched(_lines(record, ledger.t0)):
            stream.write(encode(batch))
    if record.stage_times is not None:
        text = json.dumps({"features": _feature_names(record.stage_times), "weights": record.stage_times})
        (path / "stage_times.json").write_text(text + "\n", encoding="utf-8")
    write_trace(path / "trace.json.gz", record, ledger, title=title)
    return summary


def load_fleet(folder: RunFolder) -> Fleet:
    """The replicas of a fleet's folder, or the run of a run folder as a fleet of one.

    Raises:
        ConfigError: one of the files is damaged.
    """
    replicas = folder.replicas
    starts = folder.summary.get("replica_starts", [0.0] * len(replicas))
    return Fleet([replica.load() for replica in replicas], starts)


def replica_folder(number: int) -> str:
    """The name of a replica's run folder inside its fleet's."""
    return f"replica_{number}"


def is_run_folder(path: Path) -> bool:
    """Whether it is a run's, or a fleet's."""
    return all((path / name).is_file() for name in FILES) or _is_fleet(path)


def _is_fleet(path: Path) -> bool:
    return (path / FILES[0]).is_file() and all((path / replica_folder(0) / name).is_file() for name in FILES)


def read_run_folder(path: Path) -> RunFolder:
    """What `write_run_data` or `write_fleet_data` wrote, its record not read yet.

    Raises:
        ConfigError: not a run folder, or its summary is damaged.
    """
    for name in FILES:
        if not (path / name).is_file() and not _is_fleet(path):
            raise ConfigError(f"{path}: not a run folder, it has no {name}")
    try:
        return RunFolder(path, msgspec.json.decode((path / FILES[0]).read_bytes(), type=dict[str, Any]))
    except _DAMAGE as error:
        raise _damaged(path / FILES[0], error) from error


def _damaged(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path}: damaged, or not written by gapless ({error})")


def title_of(config: Mapping[str, Any]) -> str:
    """A run's title, made of its model and its policy."""
    groups = (config.get(group) for group in ("model", "scheduler"))
    names = [str(group["name"]) for group in groups if isinstance(group, Mapping) and "name" in group]
    return ": ".join(["gapless", ", ".join(names)]) if names else "gapless"


def _batched(items: Iterator[T]) -> Iterator[list[T]]:
    while batch := list(islice(items, 20_000)):
        yield batch


def _span_lines(record: RunRecord, ledger: Ledger) -> Iterator[bytes]:
    """Header and rows of spans.csv.gz, by micro-batch, then by stage, some at a time."""
    yield ",".join(SPAN_COLUMNS).encode() + b"\n"
    spans, made = record.spans, ledger.micro_batches
    stage, micro_batch = (np.array(list(map(attrgetter(name), spans)), np.int64) for name in ("stage", "micro_batch"))
    order = np.lexsort((stage, micro_batch))
    stage, micro_batch = stage[order], micro_batch[order]
    times = [np.array(list(map(attrgetter(name), spans)), np.float64)[order] for name in SPAN_COLUMNS[2:7]]

    row = made.places(micro_batch)  # -1 of a micro-batch that has no record: it takes the last of what was foreseen
    unknown = [np.nan] * record.num_stages
    foreseen = np.array([s.predicted or unknown for s in record.micro_batches] + [unknown], np.float64)

    # What was idle before it: lanes hold the same spans, stage by stage.
    gaps = [ledger.gaps(number) for number in range(ledger.num_stages)]
    idle, cause = (np.concatenate([gap[i] for gap in gaps]) for i in range(2))
    lane = np.repeat(np.arange(ledger.num_stages), [len(lane.micro_batch) for lane in ledger.lanes])
    of_span = np.lexsort((lane, np.concatenate([lane.micro_batch for lane in ledger.lanes])))
    idle, cause = idle[of_span], cause[of_span]

    counts = made.prefill, made.decodes, made.context, made.chunk_prefix
    for at in range(0, len(micro_batch), _ROWS):
        some = slice(at, at + _ROWS)
        rows = row[some]
        known, predicted = rows >= 0, foreseen[rows, stage[some]]
        yield csv_text(
            [
                integers(micro_batch[some]),
                integers(stage[some]),
                *(decimals(nanoseconds(time[some] - ledger.t0), 9) for time in times),
                decimals(nanoseconds(values_at(made.dispatched, rows) - ledger.t0), 9, known),
                *(integers(values_at(count, rows), known) for count in counts),
                decimals(nanoseconds(idle[some]), 6),
                names(cause[some], CAUSES),
                decimals(nanoseconds(np.nan_to_num(predicted)), 6, np.isfinite(predicted)),
            ]
        )


def _read_spans(text: Iterable[str]) -> list[Span]:
    rows = csv.reader(text)
    at = {name: i for i, name in enumerate(next(rows, []))}
    micro_batch, stage, *times = (at[name] for name in SPAN_COLUMNS[:7])
    ready, arrived, begin, end, sent = times
    return [
        Span(
            int(row[micro_batch]), int(row[stage]),
            float(row[ready]), float(row[arrived]), float(row[begin]), float(row[end]), float(row[sent]),
        )
        for row in rows
    ]  # fmt: skip


def _feature_names(weights: list[list[float]]) -> list[str] | None:
    """Names of what the weights weigh; None where they are of another number."""
    return list(FEATURES) if all(len(stage) == len(FEATURES) for stage in weights) else None


class _StageTimes(msgspec.Struct):
    """`stage_times.json`: seconds of a stage are its `weights` times the features, summed."""

    weights: list[list[float]]
    features: list[str] | None = None


class _Head(msgspec.Struct, array_like=True, tag="run"):
    num_stages: int
    num_blocks: int
    notes: list[str] = []


class _MicroBatchLine(msgspec.Struct, array_like=True, tag="step"):
    micro_batch: int
    dispatched: float
    completed: float | None
    kv_blocks_used: int
    num_waiting: int
    num_running: int
    chunks: list[tuple[int, int, int]]
    decodes: tuple[list[int], list[int]]  # requests, starts
    waits: list[tuple[float, float, Blocked]]
    predicted: list[float] | None = None
    sampled_rows: int = 0


class _RequestLine(msgspec.Struct, array_like=True, tag="request"):
    request: int
    prompt_tokens: int
    arrival: float
    first_dispatched: float | None
    finished: float | None
    finish_reason: str | None
    preemptions: int
    token_times: list[float]


def _lines(record: RunRecord, origin: float) -> Iterator[_Head | _MicroBatchLine | _RequestLine]:
    """The record without its spans, a line each; times from `origin`, to the nanosecond."""

    def at(seconds: float) -> float:
        return round(seconds - origin, 9)

    def maybe(seconds: float | None) -> float | None:
        return None if seconds is None else at(seconds)

    fields = attrgetter("request", "start", "tokens")

    yield _Head(record.num_stages, record.num_blocks, record.notes)
    for s in record.micro_batches:
        waits = [(at(wait.start), at(wait.end), wait.reason) for wait in s.waits]
        yield _MicroBatchLine(
            s.micro_batch, at(s.dispatched), maybe(s.completed), s.kv_blocks_used, s.num_waiting, s.num_running,
            list(map(fields, s.chunks)), (s.decodes.requests.tolist(), s.decodes.starts.tolist()), waits,
            s.predicted and [round(p, 9) for p in s.predicted], s.sampled_rows,
        )  # fmt: skip
    for r in record.requests:
        yield _RequestLine(
            r.request, r.prompt_tokens, at(r.arrival), maybe(r.first_dispatched), maybe(r.finished), r.finish_reason,
            r.preemptions, np.round(np.array(r.token_times, np.float64) - origin, 9).tolist(),
        )  # fmt: skip


def _read_lines(lines: Iterable[bytes]) -> RunRecord:
    decode = msgspec.json.Decoder(_Head | _MicroBatchLine | _RequestLine).decode
    record: RunRecord | None = None
    for raw in lines:
        line = decode(raw)
        if isinstance(line, _Head):
            record = RunRecord(line.num_stages, line.num_blocks, notes=line.notes)
        elif record is None:
            raise ValueError("its first line is not the run's")
        elif isinstance(line, _MicroBatchLine):
            record.micro_batches.append(
                MicroBatchRecord(
                    line.micro_batch,
                    line.dispatched,
                    [SegmentRecord(*part) for part in line.chunks],
                    DecodesRecord.at(*line.decodes),
                    [Wait(*wait) for wait in line.waits],
                    line.completed,
                    line.kv_blocks_used,
                    line.num_waiting,
                    line.num_running,
                    line.sampled_rows,
                    line.predicted,
                )
            )
        else:
            record.requests.append(
                RequestRecord(
                    line.request,
                    line.prompt_tokens,
                    line.arrival,
                    line.token_times,
                    line.first_dispatched,
                    line.finished,
                    line.finish_reason,
                    line.preemptions,
                )
            )
    if record is None:
        raise ValueError("it is empty")
    return record
