"""Requests of a recorded trace: a CSV as the Azure LLM inference traces (2023, 2024) and BurstGPT write it, or a JSONL
as Mooncake and Bailian do."""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import TextIO

import msgspec
import numpy as np

from ...conf.errors import ConfigError
from ...conf.workloads import TraceConfig
from ..core.numbers import is_number
from .workload import Drawn

# Column names in lower case: what they are called in the Azure traces, in BurstGPT, in Vidur's and, made a CSV of, in
# Mooncake's.
_COLUMNS = (
    ("timestamp", "arrived_at"),
    ("contexttokens", "request tokens", "num_prefill_tokens", "input_length"),
    ("generatedtokens", "response tokens", "num_decode_tokens", "output_length"),
)
_RIGHT = "TIMESTAMP, ContextTokens, GeneratedTokens (Azure) or Timestamp, Request tokens, Response tokens (BurstGPT)"
_MOST_TOKENS = 1 << 40


class _Json(msgspec.Struct):
    """A line of Mooncake's traces (https://github.com/kvcache-ai/Mooncake), or of those of Qwen on Bailian
    (https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon), which have a `chat_id` besides."""

    timestamp: float
    input_length: int
    output_length: int
    chat_id: int | str | None = None

    @property
    def seconds(self) -> float:
        """Mooncake's are milliseconds, Bailian's seconds."""
        return self.timestamp / 1e3 if self.chat_id is None else self.timestamp


def draw(config: TraceConfig, num: int | None) -> Drawn:
    """The first `num` rows in the order of time (null: all), `time_scale` times as fast; no tokens count as one.

    Raises:
        ConfigError: no such file, not such a CSV or JSONL, a bad row (by its line), or fewer rows than `num`.
    """
    rows = np.array(list(_rows(Path(config.path).expanduser())), np.float64).reshape(-1, 3)
    if not len(rows):
        raise ConfigError(f"{config.path}: no requests in it")
    if num is not None and num > len(rows):
        raise ConfigError(f"workload.num_prompts={num}: {config.path} holds {len(rows)} requests")
    rows = rows[np.argsort(rows[:, 0], kind="stable")][:num]
    lengths = np.maximum(rows[:, 1:], 1).astype(np.int64)
    times = (rows[:, 0] - rows[0, 0]) / config.time_scale
    return Drawn(lengths[:, 0].copy(), lengths[:, 1].copy(), times)


def _rows(path: Path) -> Iterator[tuple[float, int, int]]:
    """Seconds, prompt and output tokens of each row."""
    line = 1
    try:
        with _open(path) as file:
            first = file.readline()
            lines = chain([first], file)
            for line, text, entry in _of_json(path, lines) if first.lstrip().startswith("{") else _of_csv(path, lines):
                if not (math.isfinite(entry[0]) and 0 <= min(entry[1:]) <= max(entry[1:]) < _MOST_TOKENS):
                    raise ConfigError(f"{path}:{line}: out of range: {text[:80]!r}")
                yield entry
    except FileNotFoundError:
        raise ConfigError(f"workload.path={path}: no such file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a CSV in UTF-8 ({error.reason} after line {line})") from None
    except csv.Error as error:
        raise ConfigError(f"{path}: not a CSV ({error} after line {line})") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{path}: a damaged .gz ({error})") from None
    except OSError as error:
        raise ConfigError(f"workload.path={path}: {(error.strerror or 'cannot be read').lower()}") from None


_Row = tuple[int, str, tuple[float, int, int]]  # a line's number, its text, what it says


def _of_csv(path: Path, lines: Iterable[str]) -> Iterator[_Row]:
    reader = csv.reader(lines)
    columns = _columns(path, next(reader, []))
    seconds: Callable[[str], float] | None = None
    for row in reader:
        if not row or (len(row) == 1 and not row[0].strip()):
            continue
        text = ",".join(row)
        try:
            time, inputs, outputs = (row[column] for column in columns)
            seconds = seconds or (float if is_number(time) else _timestamp)
            yield reader.line_num, text, (seconds(time), int(inputs), int(outputs))
        except (ValueError, IndexError):
            raise ConfigError(f"{path}:{reader.line_num}: not a time and two token counts: {text[:80]!r}") from None


def _of_json(path: Path, lines: Iterable[str]) -> Iterator[_Row]:
    decode = msgspec.json.Decoder(_Json).decode
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text:
            continue
        try:
            row = decode(text)
        except msgspec.MsgspecError as error:
            what = f"{path}:{number}: not a timestamp, an input_length and an output_length ({error})"
            raise ConfigError(f"{what}: {text[:80]!r}") from None
        yield number, text, (row.seconds, row.input_length, row.output_length)


def _open(path: Path) -> TextIO:
    """The text of a file that is compressed or not, as its first bytes say."""
    if path.is_fifo():  # it is read twice: checked before the run folder is made, then run
        raise ConfigError(f"workload.path={path}: a pipe; give a file")
    with path.open("rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    if zipped:
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _columns(path: Path, header: list[str]) -> list[int]:
    names = [name.strip().lower() for name in header]
    found = [next((names.index(name) for name in choices if name in names), -1) for choices in _COLUMNS]
    if -1 in found:
        raise ConfigError(f"{path}:1: its columns must be {_RIGHT}; it has {', '.join(header)[:80] or 'none'}")
    return found


def _timestamp(text: str) -> float:
    """Seconds of a date and time in ISO 8601, in UTC where it names no zone."""
    time = datetime.fromisoformat(text.strip())
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
