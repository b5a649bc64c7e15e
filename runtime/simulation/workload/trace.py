"""Reads requests from a recorded trace: prompt tokens, output tokens and arrival times.

The file is a CSV or JSON, in lines or as an array, with the column names of the Azure LLM inference traces, BurstGPT,
Vidur, Mooncake, Bailian and others. Mooncake's and Bailian's name the blocks that prompts begin with alike.
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

from ...conf.errors import ConfigError
from ...conf.row_files import first_row, json_rows, open_rows
from ...conf.user_path import user_path
from ...conf.workloads import TraceConfig
from ..core.numbers import is_number
from .prefix_ids import PrefixIds
from .workload import DrawnRequests

# By what a row says: the names, in lower case, of its column or key in the traces of Azure, BurstGPT, Vidur, Mooncake,
# Bailian and Splitwise, and in those of benchmarks. Of several the first counts.
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
_MOONCAKE_BLOCK, _BAILIAN_BLOCK = 512, 16  # tokens of a block that a hash id stands for
_EARLIEST_S, _LATEST_S = 1e9, 1e11  # seconds since 1970: the years 2001 and 5138


def draw(config: TraceConfig, num_requests: int | None) -> DrawnRequests:
    """Return the first `num_requests` rows in the order of time, `time_scale` times as fast. None: all rows.

    A prompt or an output of 0 tokens counts as 1.

    Raises:
        ConfigError: the file is missing or is no such trace, a row is bad (the error names its line), or there are
            fewer rows than `num_requests`.
    """
    prefixes: list[PrefixIds | None] = []
    entries: list[tuple[float, int, int]] = []
    for entry, prefix in _requests(user_path(config.path, "workload.path"), config.hash_block_size):
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


def _requests(path: Path, hash_block_size: int | None) -> Iterator[tuple[tuple[float, int, int], PrefixIds | None]]:
    """Yield the seconds, prompt tokens and output tokens of each row, and what its prompt begins with."""
    line = 1
    since_1970: bool | None = None  # the first row's time; its size says the unit
    known: dict[int | str, int] = {}  # a small number for each hash id, which may have any number of bits
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
        raise ConfigError(f"{path}: not text in UTF-8 ({error.reason} after line {line})") from None
    except csv.Error as error:
        raise ConfigError(f"{path}: not a CSV ({error} after line {line})") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{path}: a damaged .gz ({error})") from None
    except OSError as error:
        raise ConfigError(f"workload.path={path}: {(error.strerror or 'cannot be read').lower()}") from None


def _rows(path: Path, lines: Iterator[str]) -> Iterator[tuple[int, dict[str, Any], bool]]:
    """Yield what each row of JSON or a CSV says under the keys of `_NAMES`, the number of its line first.

    The last part is whether its time is in milliseconds.
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
    """Return under which name each of `_NAMES` stands, in a row or a header.

    Raises:
        ConfigError: a required one is missing, or stands twice.
    """
    found = {what: next((name for name in choices if name in names), "") for what, choices in _NAMES.items()}
    if not all(found[what] for what in _REQUIRED):
        has = ", ".join(names)[:80] or "none"
        raise ConfigError(f"{path}:{line}: its columns must be {_EXPECTED}; it has {has}")
    if isinstance(names, list) and (twice := next((name for name in found.values() if names.count(name) > 1), None)):
        raise ConfigError(f"{path}:{line}: the column {twice!r} is given twice")
    return {what: name for what, name in found.items() if name}


def _in_milliseconds(names: Mapping[str, str]) -> bool:
    """Return whether times are in milliseconds, as Mooncake's are. Bailian's, with a chat, are in seconds."""
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
    """Convert a whole number, whatever it is written as: 12, 12.0 or a text of either."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(value)
    if isinstance(value, int) or (isinstance(value, str) and value.strip().isdecimal()):
        return int(value)
    count = int(float(value))
    if count != float(value):
        raise ValueError(value)
    return count


class _HashIdsError(ValueError):
    """Hash ids that say nothing of the prompt."""


def _prefix(row: Mapping[str, Any], num_tokens: int, size: int | None, known: dict[int | str, int]) -> PrefixIds | None:
    """Return the prompt's hash ids, each for `size` tokens; None: for as many as in the published traces.

    A hash id stands for a block of the prompt and for all before it. A partial block at the end may have one. `known`
    has a number for each id of the file; new ones are added.
    """
    ids = row.get("block ids")
    if isinstance(ids, str) and ids:  # of a CSV
        try:
            ids = json.loads(ids.replace("'", '"'))  # as Python prints a list of texts
        except ValueError:
            raise _HashIdsError(f"hash_ids: not a list of numbers: {ids[:80]!r}") from None
    if ids is None or ids in ("", []):
        return None
    if isinstance(ids, list):
        ids = [int(each) if isinstance(each, float) and abs(each) < 1 << 53 and each % 1 == 0 else each for each in ids]
    if not isinstance(ids, list) or not all(type(each) in (int, str) for each in ids):
        raise _HashIdsError(f"hash_ids: must be a list of whole numbers or texts: {str(ids)[:80]!r}")
    size = size or (_BAILIAN_BLOCK if "chat" in row else _MOONCAKE_BLOCK)
    if len(ids) not in (num_tokens // size, -(-num_tokens // size)):
        count = f"{len(ids)} entries for {num_tokens} tokens"
        raise _HashIdsError(f"hash_ids has {count}, not one for each {size}; see workload.hash_block_size")
    return PrefixIds([known.setdefault(each, len(known)) for each in ids], size)


def _text(row: Mapping[str, Any]) -> str:
    """Return what a row says, for an error."""
    return repr(",".join(str(value) for value in row.values())[:80])
