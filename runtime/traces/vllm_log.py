"""Reads vLLM's iteration log: what each engine iteration held, and how long the engine waited for it.

`--enable-logging-iteration-details` makes vLLM write a line for each iteration (vLLM pull request 31193; read here as
0.14 to 0.32 write it, by `vllm/v1/engine/core.py` first and by `vllm/v1/metrics/loggers.py` later):

    INFO 11-24 23:23:10 [loggers.py:199] Engine 000: Iteration(3): 1 context requests, 256 context tokens, 2 generation
    requests, 2 generation tokens, iteration elapsed time: 8.48 ms, GPU KV cache usage: 0.5%

A line carries whole seconds, so when an iteration ended is bounded by its own line and those around it: an iteration
ends no earlier than the one before it and its own elapsed time, and no later than its line.
"""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import numpy as np

from ...conf.errors import ConfigError
from ...conf.row_files import gunzipped
from ..core.micro_batch_columns import Floats
from .rank_trace import Step

_COLOR = re.compile(r"(?:\x1b|\\u001b|\\x1b|\\033)\[[0-9;]*[mK]", re.IGNORECASE)  # as it is, or in JSON
_ITERATION = re.compile(
    r"(?:Engine (?P<engine>\d+): )?Iteration\((?P<index>\d+)\): "
    r"(?P<prefill_requests>\d+) context requests, (?P<prefill_tokens>\d+) context tokens, "
    r"(?P<decode_requests>\d+) generation requests, (?P<decode_tokens>\d+) generation tokens, "
    r"iteration elapsed time: (?P<elapsed>[\d.]+) ms(?P<dummy> \(dummy\))?"
)
_DATE = re.compile(r"(?P<month>\d\d)-(?P<day>\d\d)[ T](?P<time>\d\d:\d\d:\d\d)(?P<fraction>[.,]\d+)?")
_PROCESS = re.compile(r"\(EngineCore[A-Za-z]*(?:_(?:DP)?(?P<engine>\d+))?(?: pid=(?P<pid>\d+))?")
_SERVER = re.compile(
    r"\s*(\[?pod/[^\s\]]+|[\w.-]+(?= +\| ))"
)  # before the lines of `kubectl logs --prefix`, docker compose
_LEAP_YEAR = 2000  # a line has no year
_DAY = 86400.0
_NAMES = re.compile(r"\.(?:log|txt|out|err|jsonl)(?:[.-]\d+)*(?:\.gz)?$", re.IGNORECASE)
_HOW = "start vLLM with --enable-logging-iteration-details, and without --disable-log-stats"


@dataclass(frozen=True, slots=True)
class Iteration:
    """A line of the log.

    Attributes:
        logged: when the line was written, in seconds of its year, by the log's own clock and time zone.
        resolution: seconds of the line's last digit.
        elapsed: seconds that the engine waited for the iteration's result.
        server: what tells this engine from others of its number in one log: its server's name, or its process.
    """

    engine: int
    index: int
    logged: float
    resolution: float
    elapsed: float
    prefill_requests: int
    prefill_tokens: int
    decode_requests: int
    decode_tokens: int
    server: str = ""


def read_iterations(path: Path, notes: list[str] | None = None) -> list[Iteration]:
    """Return the iterations of a log's engine in their order, without dummy ones of data parallelism.

    Of several engines it is the first, by its number; of several runs of the server the one with the most iterations.
    `notes` get a line about those that are left out.

    Raises:
        ConfigError: it has none, or one of them has no date.
    """
    runs: dict[tuple[int, str], list[list[Iteration]]] = {}
    total = 0
    for line in _lines(path):
        total += 1
        own = runs.setdefault((line.engine, line.server), [[]])
        last = own[-1][-1] if own[-1] else None
        if last is not None and line.index <= last.index:
            own.append([])
            last = None
        if last is not None and line.logged < last.logged - _DAY:  # over New Year's Eve
            line = replace(line, logged=line.logged + 366 * _DAY)
        own[-1].append(line)
    if not runs:
        raise ConfigError(f"{path}: no line of vLLM's iteration log; {_HOW}")
    first = min(engine for engine, _ in runs)
    longest = max((run for (engine, _), own in runs.items() if engine == first for run in own), key=len)
    if notes is not None and len(longest) < total:
        kept = f"engine {first} {longest[0].server}".strip()
        of = "other runs of the server" if len(runs) == 1 else f"engines other than {kept}"
        notes.append(f"{path.name}: {total - len(longest):,} of {total:,} iterations are left out, of {of}.")
    return longest


def _lines(path: Path) -> Iterator[Iteration]:
    try:
        with path.open("rb") as raw:
            for number, text in enumerate(io.TextIOWrapper(gunzipped(raw), encoding="utf-8-sig", errors="replace"), 1):
                text = _COLOR.sub("", text) if "Iteration(" in text else ""
                found = _ITERATION.search(text)
                if found is not None and not found["dummy"]:
                    try:
                        yield _iteration(text, found)
                    except ValueError as error:
                        raise ConfigError(f"{path}:{number}: {error}") from None
    except (OSError, EOFError, zlib.error) as error:
        what = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read ({what})") from error


def _iteration(text: str, found: re.Match[str]) -> Iteration:
    """Return the iteration of a line. Of several dates the finest counts, then the last before what the line says.

    Raises:
        ValueError: it has no date, or one that is none.
    """
    dates = list(_DATE.finditer(text))
    if not dates:
        raise ValueError("an iteration without its date and time, which vLLM's own format of logs has")
    date = max(dates, key=lambda date: (len(date["fraction"] or ""), date.end() <= found.start(), date.start()))
    fraction = (date["fraction"] or "").replace(",", ".")
    since = datetime.strptime(f"{_LEAP_YEAR}-{date['month']}-{date['day']} {date['time']}", "%Y-%m-%d %H:%M:%S")
    process, server = _PROCESS.search(text), _SERVER.match(text)
    number = found["engine"] or (process["engine"] if process else None)
    pid = f"pid {process['pid']}" if process and process["pid"] and number is None else ""
    return Iteration(
        int(number or 0),
        int(found["index"]),
        (since - datetime(_LEAP_YEAR, 1, 1)).total_seconds() + float(fraction or 0.0),
        10.0 ** -max(0, len(fraction) - 1),
        float(found["elapsed"]) / 1e3,
        int(found["prefill_requests"]),
        int(found["prefill_tokens"]),
        int(found["decode_requests"]),
        int(found["decode_tokens"]),
        " ".join(part for part in (server[1] if server else "", pid) if part),
    )


def iteration_times(iterations: Sequence[Iteration]) -> tuple[Floats, Floats, float]:
    """Return the begin and end of each iteration, in seconds from the first begin, and how far off they may be.

    The last number is in seconds too, and holds for the idle time between the first and the last as well.

    Of all times that fit the lines and the elapsed times, they are those that spread the time between iterations most
    evenly; the first and the last end lie in the middle of what is possible.
    """
    logged = np.array([iteration.logged for iteration in iterations])
    logged -= logged[0]
    until = logged + np.array([iteration.resolution for iteration in iterations])
    elapsed = np.array([iteration.elapsed for iteration in iterations])
    worked = np.cumsum(elapsed)
    least = np.maximum.accumulate(logged - worked)  # seconds without work, until each end
    most = np.minimum.accumulate((until - worked)[::-1])[::-1]
    least -= max(0.0, float((least - most).max()))  # lines that were written late
    idle = taut_string(least, most)
    off = float(np.maximum(most - idle, idle - least).max())
    in_all, least_in_all = idle[-1] - idle[0], max(0.0, float(least[-1] - most[0]))
    off = max(off, float(most[-1] - least[0] - in_all), float(in_all - least_in_all))
    end = worked + idle
    begin = end - elapsed
    return begin - begin[0], end - begin[0], off


def taut_string(low: Floats, high: Floats) -> Floats:
    """Return the shortest line between two that ascend, over places 0 to n - 1.

    It leads from the middle between them to the middle.
    """
    line = (low + high) / 2
    low, high = low.copy(), high.copy()
    place, last = 0, len(line) - 1
    low[last] = high[last] = line[last]
    while place < last:
        value, steps = line[place], np.arange(1, last - place + 1)
        steepest = (high[place + 1 :] - value) / steps
        flattest = (low[place + 1 :] - value) / steps
        ceiling, floor = np.minimum.accumulate(steepest), np.maximum.accumulate(flattest)
        crossed = np.flatnonzero(floor > ceiling)
        if not len(crossed):
            reach, slope = len(steps), flattest[-1]
        elif flattest[crossed[0]] > ceiling[crossed[0]]:  # up, around the last corner of `high`
            reach = int(np.flatnonzero(steepest[: crossed[0]] == ceiling[crossed[0] - 1])[-1]) + 1
            slope = ceiling[crossed[0] - 1]
        else:
            reach = int(np.flatnonzero(flattest[: crossed[0]] == floor[crossed[0] - 1])[-1]) + 1
            slope = floor[crossed[0] - 1]
        line[place + 1 : place + reach + 1] = value + slope * steps[:reach]
        place += reach
    return line


def log_file(paths: Iterable[Path], notes: list[str] | None = None) -> Path:
    """Return the log with the most iterations of those that `paths` are or hold; `notes` get a line about the others.

    Raises:
        ConfigError: none has one.
    """
    candidates = list(dict.fromkeys(log for path in paths for log in logs_in(path)))
    most = max(candidates, key=lambda log: sum(1 for _ in _lines(log)), default=None)
    if most is None:
        raise ConfigError(f"{next(iter(paths))}: holds no line of vLLM's iteration log (.log, .txt, .out, ...); {_HOW}")
    if notes is not None and len(candidates) > 1:
        others = ", ".join(log.name for log in candidates if log != most)
        notes.append(f"{most.name} is the log with the most iterations; left out: {others}.")
    return most


def logs_in(path: Path) -> list[Path]:
    """Return the logs in a folder that have iterations, by name; a file itself.

    Raises:
        ConfigError: no such file or folder.
    """
    if not path.exists():
        raise ConfigError(f"{path}: no such file or folder")
    if path.is_file():
        return [path]
    files = sorted(file for file in path.iterdir() if _NAMES.search(file.name) and file.is_file())
    return [file for file in files if next(_lines(file), None) is not None]


def named(step: Step, iteration: Iteration) -> Step:
    """Return the step with the make-up of the iteration, and its number as the label."""
    return replace(
        step,
        label=step.label or f"Iteration({iteration.index})",
        prefill_requests=iteration.prefill_requests,
        prefill_tokens=iteration.prefill_tokens,
        decode_requests=iteration.decode_requests,
        decode_tokens=iteration.decode_tokens,
    )
