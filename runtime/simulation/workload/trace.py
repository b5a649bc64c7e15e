"""Reads requests from a recorded trace: prompt tokens, output tokens and arrival times.

The file is CSV, JSON Lines or a JSON array, with the column names of the Azure LLM inference traces, BurstGPT, Vidur,
Mooncake, Bailian and others. Mooncake and Bailian traces also have hash ids of prompt blocks, for prefix caching.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import zlib
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from ....conf.errors import ConfigError
from ....conf.row_files import first_row, json_rows, open_rows
from ....conf.user_path import user_path
from ....conf.workloads import TraceConfig
from ...core.numbers import is_number
from ...core.prefix_ids import PrefixIds
from .workload import DrawnRequests

# For each field: its column or key names, in lower case, in the traces of Azure, BurstGPT, Vidur, Mooncake, Bailian and
# Splitwise, and in benchmark files. The first name found is used.
_NAMES = {
    "time": ("timestamp", "arrived_at", "arrival_timestamp", "arrival_time", "start_time"),
    "prompt tokens": (
        *("contexttokens", "request tokens", "num_prefill_tokens", "input_length", "prompt_size", "input_tokens"),
        *("prompt_tokens", "num_prompt_tokens", "prompt_len", "input_len", "isl"),
    ),
    "output tokens": (
        *("generatedtokens", "response tokens", "num_decode_tokens", "output_length", "token_size", "output_tokens"),
        *("completion_tokens", "generated_tokens", "num_output_tokens", "output_len", "osl"),
    ),
    "block ids": ("hash_ids",),
    "chat": ("chat_id",),
}
_REQUIRED = list(_NAMES)[:3]
_EXPECTED = (
    "TIMESTAMP, ContextTokens, GeneratedTokens (Azure), Timestamp, Request tokens, Response tokens (BurstGPT) or "
    "timestamp, input_length, output_length (Mooncake)"
)
_TOKEN_LIMIT = 1 << 40
_MOONCAKE_BLOCK, _BAILIAN_BLOCK = 512, 16  # tokens per hash id
_EARLIEST_S, _LATEST_S = 1e9, 1e11  # seconds since 1970: the years 2001 and 5138


def draw(config: TraceConfig, num_requests: int | None) -> DrawnRequests:
    """Return the first `num_requests` rows (None: all) in time order, sped up by `time_scale`.

    A prompt or an output of 0 tokens counts as 1.

    Raises:
        ConfigError: the file is missing or not such a trace, a row is invalid (the error names its line), or there are
            fewer rows than `num_requests`.
    """
    prefixes: list[PrefixIds | None] = []
    entries: list[tuple[float, int, int]] = []
    for entry, prefix in _requests(user_path(config.path, "workload.path"), config.hash_block_size):
        entries.append(entry)
        prefixes.append(prefix)
    rows = np.array(entries, np.float64).reshape(-1, 3)
    if not len(rows):
        raise ConfigError(f"{config.path}: has no requests")
    if num_requests is not None and num_requests > len(rows):
        raise ConfigError(f"workload.num_prompts={num_requests}: {config.path} has {len(rows)} requests")
    order = np.argsort(rows[:, 0], kind="stable")[:num_requests]
    rows = rows[order]
    lengths = np.maximum(rows[:, 1:], 1).astype(np.int64)
    times = (rows[:, 0] - rows[0, 0]) / config.time_scale
    shared = [prefixes[number] for number in order.tolist()] if any(prefixes) else None
    return DrawnRequests(lengths[:, 0].copy(), lengths[:, 1].copy(), times, prefixes=shared)


def _requests(path: Path, hash_block_size: int | None) -> Iterator[tuple[tuple[float, int, int], PrefixIds | None]]:
    """Yield each row's time in seconds, prompt tokens and output tokens, and its prompt's prefix ids."""
    line = 1
    since_1970: bool | None = None  # whether the first row's time is a Unix time
    known: dict[int | str, int] = {}  # hash ids, of any size, numbered from 0
    try:
        with open_rows(path, "workload.path") as file:
            lines = io.TextIOWrapper(file, "utf-8-sig", newline="")
            for line, row, in_milliseconds in _rows(path, lines):
                try:
                    if since_1970 is None:
                        since_1970 = is_number(row["time"]) and float(row["time"]) >= _EARLIEST_S
                    entry = (
                        _seconds(row["time"], in_milliseconds and not since_1970),
                        _count(row["prompt tokens"]),
                        _count(row["output tokens"]),
                    )
                    prefix = _prefix(row, entry[1], hash_block_size, known)
                except _HashIdsError as error:
                    raise ConfigError(f"{path}:{line}: {error}") from None
                except (KeyError, TypeError, ValueError, OverflowError):
                    what = "not a time and two token counts"
                    raise ConfigError(f"{path}:{line}: {what}: {_text(row)}") from None
                if not (math.isfinite(entry[0]) and 0 <= min(entry[1:]) <= max(entry[1:]) < _TOKEN_LIMIT):
                    raise ConfigError(f"{path}:{line}: out of range: {_text(row)}")
                yield entry, prefix
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason} after line {line})") from None
    except csv.Error as error:
        raise ConfigError(f"{path}: not a CSV ({error} after line {line})") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{path}: a damaged .gz ({error})") from None
    except OSError as error:
        raise ConfigError(f"workload.path={path}: {(error.strerror or 'cannot be read').lower()}") from None


def _rows(path: Path, lines: Iterator[str]) -> Iterator[tuple[int, dict[str, Any], bool]]:
    """Yield each row of JSON or a CSV.

    Each item is the line number, the values by the keys of `_NAMES`, and whether the time is in milliseconds.
    """
    header, first, lines = first_row(lines)
    if header.lstrip().startswith(("{", "[")):
        for number, row in json_rows(lines, str(path), first):
            said = {key.strip().lower(): value for key, value in row.items()} if isinstance(row, dict) else {}
            names = _names(path, number, said)
            yield number, {what: said[name] for what, name in names.items()}, _in_milliseconds(names)
        return
    delimiter = max(",;\t", key=header.count)
    reader = csv.reader(lines, delimiter=delimiter)
    places = [name.strip().lower() for name in next(reader, [])]
    names = _names(path, first, places)
    columns = [(what, places.index(name)) for what, name in names.items()]
    in_milliseconds = _in_milliseconds(names)
    for cells in reader:
        if any(cell.strip() for cell in cells):
            said = {what: cells[column].strip() for what, column in columns if column < len(cells)}
            yield first + reader.line_num - 1, said, in_milliseconds


def _names(path: Path, line: int, names: Collection[str]) -> dict[str, str]:
    """Return the name that a row or a header uses for each key of `_NAMES`.

    Raises:
        ConfigError: a required key is missing, or a column is given twice.
    """
    found = {what: next((name for name in choices if name in names), "") for what, choices in _NAMES.items()}
    if not all(found[what] for what in _REQUIRED):
        has = ", ".join(names)[:80] or "none"
        raise ConfigError(f"{path}:{line}: must have the columns {_EXPECTED}; it has {has}")
    if isinstance(names, list) and (twice := next((name for name in found.values() if names.count(name) > 1), None)):
        raise ConfigError(f"{path}:{line}: duplicate column {twice!r}")
    return {what: name for what, name in found.items() if name}


def _in_milliseconds(names: Mapping[str, str]) -> bool:
    """Return whether times are in milliseconds, as in Mooncake traces. Bailian traces, with a chat id, use seconds."""
    return names["prompt tokens"] == "input_length" and "chat" not in names


def _seconds(value: Any, in_milliseconds: bool) -> float:
    """Convert a number or an ISO 8601 date to seconds. Without a time zone, a date is in UTC.

    A number too large for seconds since 1970 is in milliseconds, microseconds or nanoseconds.
    """
    if isinstance(value, str) and not is_number(value):
        time = datetime.fromisoformat(value.strip())
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    seconds = float(value) / (1e3 if in_milliseconds else 1.0)
    while _LATEST_S <= abs(seconds) < math.inf:
        seconds /= 1e3
    return seconds


def _count(value: Any) -> int:
    """Convert a whole number, written as 12, 12.0 or a string of either."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(value)
    if isinstance(value, int) or (isinstance(value, str) and value.strip().isdecimal()):
        return int(value)
    count = int(float(value))
    if count != float(value):
        raise ValueError(value)
    return count


class _HashIdsError(ValueError):
    """Hash ids that are malformed or do not match the prompt length."""


def _prefix(row: Mapping[str, Any], num_tokens: int, size: int | None, known: dict[int | str, int]) -> PrefixIds | None:
    """Return the prompt's hash ids, each for `size` tokens (None: the block size of the published traces).

    A hash id identifies a block of the prompt together with all blocks before it. A partial block at the end may have
    one. `known` numbers the ids of the file; new ones are added.
    """
    ids = row.get("block ids")
    if isinstance(ids, str) and ids:  # from a CSV
        try:
            ids = json.loads(ids.replace("'", '"'))  # a list of strings as Python prints it
        except ValueError:
            raise _HashIdsError(f"hash_ids: not a list of numbers: {ids[:80]!r}") from None
    if ids is None or ids in ("", []):
        return None
    if isinstance(ids, list):
        ids = [int(each) if isinstance(each, float) and abs(each) < 1 << 53 and each % 1 == 0 else each for each in ids]
    if not isinstance(ids, list) or not all(type(each) in (int, str) for each in ids):
        raise _HashIdsError(f"hash_ids: must be a list of integers or strings: {str(ids)[:80]!r}")
    size = size or (_BAILIAN_BLOCK if "chat" in row else _MOONCAKE_BLOCK)
    if len(ids) not in (num_tokens // size, -(-num_tokens // size)):
        count = f"{len(ids)} entries for {num_tokens} tokens"
        raise _HashIdsError(f"hash_ids has {count}, not one per {size}; see workload.hash_block_size")
    return PrefixIds([known.setdefault(each, len(known)) for each in ids], size)


def _text(row: Mapping[str, Any]) -> str:
    """Return a row's values as text for an error."""
    return repr(",".join(str(value) for value in row.values())[:80])
