"""Reads requests from a recorded trace: prompt tokens, output tokens and arrival times.

The file is a CSV as of the Azure LLM inference traces (2023, 2024) or BurstGPT, or a JSONL as of Mooncake or Bailian.
The latter name the blocks that prompts begin with alike.
"""

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
from .prefix_ids import PrefixIds
from .workload import DrawnRequests

# The names, in lower case, of the columns for time, prompt tokens and output tokens: in the Azure traces, BurstGPT,
# Vidur's traces, and Mooncake's converted to CSV.
_COLUMN_NAMES = (
    ("timestamp", "arrived_at"),
    ("contexttokens", "request tokens", "num_prefill_tokens", "input_length"),
    ("generatedtokens", "response tokens", "num_decode_tokens", "output_length"),
)
_EXPECTED = "TIMESTAMP, ContextTokens, GeneratedTokens (Azure) or Timestamp, Request tokens, Response tokens (BurstGPT)"
_TOKEN_LIMIT = 1 << 40


_JSON_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
_MOONCAKE_BLOCK, _BAILIAN_BLOCK = 512, 16  # tokens of a block that a hash id stands for


class _JsonRow(msgspec.Struct):
    """A line of Mooncake's traces, or of Qwen's on Bailian.

    They lie at https://github.com/kvcache-ai/Mooncake and https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon.
    Only the latter have a `chat_id`.

    A hash id stands for a block of the prompt and for all before it. A partial block at the end may have one.
    """

    timestamp: float
    input_length: int
    output_length: int
    chat_id: int | str | None = None
    hash_ids: list[int] | None = None

    @property
    def seconds(self) -> float:
        """The timestamp in seconds. Mooncake's are in milliseconds, Bailian's in seconds."""
        return self.timestamp / 1e3 if self.chat_id is None else self.timestamp

    def prefix(self, size: int | None) -> PrefixIds | None:
        """Return the prompt's hash ids, each for `size` tokens; None: for as many as in the published traces.

        Raises:
            ValueError: they are not as many as the prompt has blocks.
        """
        if self.hash_ids is None:
            return None
        size = size or (_MOONCAKE_BLOCK if self.chat_id is None else _BAILIAN_BLOCK)
        if len(self.hash_ids) not in (self.input_length // size, -(-self.input_length // size)):
            count = f"{len(self.hash_ids)} entries for {self.input_length} tokens"
            raise ValueError(f"hash_ids has {count}, not one for each {size}; see workload.hash_block_size")
        return PrefixIds(self.hash_ids, size)


def draw(config: TraceConfig, num_requests: int | None) -> DrawnRequests:
    """Return the first `num_requests` rows in the order of time, `time_scale` times as fast. None: all rows.

    A prompt or an output of 0 tokens counts as 1.

    Raises:
        ConfigError: the file is missing or is neither such a CSV nor such a JSONL, a row is bad (the error names its
            line), or there are fewer rows than `num_requests`.
    """
    prefixes: list[PrefixIds | None] = []
    entries: list[tuple[float, int, int]] = []
    for entry, prefix in _rows(Path(config.path).expanduser(), config.hash_block_size):
        entries.append(entry)
        prefixes.append(prefix)
    rows = np.array(entries, np.float64).reshape(-1, 3)
    if not len(rows):
        raise ConfigError(f"{config.path}: no requests in it")
    if num_requests is not None and num_requests > len(rows):
        raise ConfigError(f"workload.num_prompts={num_requests}: {config.path} holds {len(rows)} requests")
    order = np.argsort(rows[:, 0], kind="stable")[:num_requests]
    rows = rows[order]
    lengths = np.maximum(rows[:, 1:], 1).astype(np.int64)
    times = (rows[:, 0] - rows[0, 0]) / config.time_scale
    shared = [prefixes[number] for number in order.tolist()] if any(prefixes) else None
    return DrawnRequests(lengths[:, 0].copy(), lengths[:, 1].copy(), times, prefixes=shared)


def _rows(path: Path, hash_block_size: int | None) -> Iterator[tuple[tuple[float, int, int], PrefixIds | None]]:
    """Yield the seconds, prompt tokens and output tokens of each row, and what its prompt begins with."""
    line = 1
    try:
        with _open(path) as file:
            first = file.readline()
            lines = chain([first], file)
            is_jsonl = first.lstrip().startswith("{")
            parsed = _parse_jsonl(path, lines, hash_block_size) if is_jsonl else _parse_csv(path, lines)
            for line, text, entry, prefix in parsed:
                if not (math.isfinite(entry[0]) and 0 <= min(entry[1:]) <= max(entry[1:]) < _TOKEN_LIMIT):
                    raise ConfigError(f"{path}:{line}: out of range: {text[:80]!r}")
                yield entry, prefix
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


# Line number, text, (seconds, prompt tokens, output tokens), and what the prompt begins with.
_Row = tuple[int, str, tuple[float, int, int], PrefixIds | None]


def _parse_csv(path: Path, lines: Iterable[str]) -> Iterator[_Row]:
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
            yield reader.line_num, text, (seconds(time), int(inputs), int(outputs)), None
        except (ValueError, IndexError):
            raise ConfigError(f"{path}:{reader.line_num}: not a time and two token counts: {text[:80]!r}") from None


def _parse_jsonl(path: Path, lines: Iterable[str], hash_block_size: int | None) -> Iterator[_Row]:
    decode = msgspec.json.Decoder(_JsonRow).decode
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text:
            continue
        twice = [key for key in _JSON_KEYS if text.count(f'"{key}"') > 1]
        if twice:
            raise ConfigError(f"{path}:{number}: key {twice[0]!r} is given twice")
        try:
            row = decode(text)
        except msgspec.MsgspecError as error:
            what = f"{path}:{number}: not a timestamp, an input_length and an output_length ({error})"
            raise ConfigError(f"{what}: {text[:80]!r}") from None
        try:
            yield number, text, (row.seconds, row.input_length, row.output_length), row.prefix(hash_block_size)
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: {error}") from None


def _open(path: Path) -> TextIO:
    """Open a text file. It is decompressed where its first bytes are those of gzip."""
    if path.is_fifo():  # a command reads the file twice: for its check and for its run
        raise ConfigError(f"workload.path={path}: a pipe; give a file")
    with path.open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    if is_gzip:
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _columns(path: Path, header: list[str]) -> list[int]:
    """Return the indices of the columns for time, prompt tokens and output tokens."""
    names = [name.strip().lower() for name in header]
    found = [next((names.index(name) for name in choices if name in names), -1) for choices in _COLUMN_NAMES]
    if -1 in found:
        raise ConfigError(f"{path}:1: its columns must be {_EXPECTED}; it has {', '.join(header)[:80] or 'none'}")
    return found


def _timestamp(text: str) -> float:
    """Convert an ISO 8601 date and time to seconds since 1970. Without a time zone, it is in UTC."""
    time = datetime.fromisoformat(text.strip())
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
