"""Terminal progress of commands: the start of the ranks, progress bars, throughput lines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from platform import python_version
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from ..conf.schema import EngineConfig
from ..runtime.core.numbers import counted, seconds_text
from ..runtime.pipeline.start_parts import READY
from .oversubscription import oversubscription, threads

_log = logging.getLogger(__name__)
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), 127, *range(128, 160)) if code not in (9, 10)}
PACKAGES = ("gapless", "torch", "megatron-core", "ray", "xformers", "numpy")
PLAIN_EVERY_S = 5.0
_TEXT_WIDTH = 64  # columns next to the bar and its name
_LEAST_BAR = 4
_SLOW_START_S = 10.0  # above it the breakdown is logged on a terminal too


class Meter:
    """Progress of a run on standard error: a bar on a terminal, else a plain line every few seconds.

    `name` identifies one of several runs. `num_requests` is None if the run is limited by time. If it `waits`, the bar
    appears with `show`.
    """

    def __init__(self, console: Console, num_requests: int | None, name: str = "", *, waits: bool = False) -> None:
        self._num_requests = num_requests
        self._name = name
        self._tokens = 0
        self._done = 0
        self._waits = waits
        self._idle: float | None = 0.0
        self._bar = _bar(console, name or "generate", TextColumn("requests  {task.fields[rates]}"))
        self._task = self._bar.add_task("", total=num_requests, rates="")

    def __enter__(self) -> Meter:
        self._start = self._printed = time.monotonic()
        if not self._waits:
            self._bar.start()
        return self

    def show(self) -> None:
        """Show the bar."""
        if self._waits:
            self._waits = False
            self._bar.start()

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
        if error[0] is None:
            self._plain()

    def update(self, tokens: int, finished: int, bubble_fraction: float | None) -> None:
        """Add new `tokens` and newly `finished` requests; `bubble_fraction` is the idle share so far, if known."""
        self._tokens += tokens
        self._done += finished
        self._idle = bubble_fraction
        self._bar.update(self._task, completed=self._done, rates=self._rates)
        if self._bar.disable and time.monotonic() - self._printed >= PLAIN_EVERY_S:
            self._plain()

    @property
    def _rates(self) -> str:
        if not self._tokens:  # none yet, or a simulation on virtual time
            return ""
        seconds = max(time.monotonic() - self._start, 1e-9)
        idle = "" if self._idle is None else f"  {self._idle:.1%} idle"
        return f"{self._tokens / seconds:.1f} tok/s{idle}"

    def _plain(self) -> None:
        self._printed = time.monotonic()
        name = f"{self._name}: " if self._name else ""
        tokens = f", {counted(self._tokens, 'token')}, {self._rates}" if self._tokens else ""
        of = "" if self._num_requests is None else f"/{self._num_requests}"
        _log.info("%s%d%s requests%s", name, self._done, of, tokens)


class Steps:
    """Progress of a multi-step command on standard error: a bar on a terminal, else a line every few seconds."""

    def __init__(self, console: Console, name: str) -> None:
        self._name = name
        self._bar = _bar(console, name, TextColumn("{task.fields[what]}", markup=False), TimeRemainingColumn())
        self._task = self._bar.add_task("", total=None, what="")

    def __enter__(self) -> Steps:
        self._printed = time.monotonic()
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def update(self, what: str, done: int, of: int | None) -> None:
        """Show the current step `what`, and that `done` of `of` steps (None: unknown) are finished."""
        self._bar.update(self._task, completed=done, total=of, what=what)
        if self._bar.disable and time.monotonic() - self._printed >= PLAIN_EVERY_S:
            self._printed = time.monotonic()
            _log.info("%s: %s %s", self._name, done if of is None else f"{done}/{of}", what)


def can_redraw(console: Console) -> bool:
    """Return whether a bar can be redrawn.

    FORCE_COLOR, which notebooks set, makes rich treat a pipe as a terminal, but it cannot be redrawn.
    """
    return console.is_terminal and console.file.isatty()


def _bar(console: Console, name: str, text: TextColumn, *further: ProgressColumn) -> Progress:
    """Make a transient progress bar, disabled if the console is not a terminal.

    On a narrow terminal the bar is shorter or absent, so that no number is truncated.
    """
    room = console.width - len(name) - _TEXT_WIDTH - 8 * len(further)
    columns: list[ProgressColumn] = [TextColumn(name, markup=False), MofNCompleteColumn(), text]
    if room >= _LEAST_BAR:
        columns = [SpinnerColumn(), columns[0], BarColumn(min(40, room)), *columns[1:], TimeElapsedColumn(), *further]
    return Progress(*columns, console=console, disable=not can_redraw(console), transient=True, refresh_per_second=4)


@contextmanager
def starting(console: Console, config: EngineConfig) -> Iterator[Callable[[str], None]]:
    """Show the progress of the start of the ranks, which takes seconds; yield the function that reports it."""
    parallel = config.parallel
    ranks = counted(parallel.world_size, "rank")
    text = f"starting {config.model.name} on {ranks} (pp={parallel.pp} x tp={parallel.tp}, {parallel.started_by})"
    if chosen := threads(config):
        text += f", {chosen}"
    if hint := oversubscription(config):
        _log.info("hint: %s", hint)
    imports, began = _until_first_start(), time.monotonic()
    times: list[float] = []

    def report(show: Callable[[str], None], progress: str) -> None:
        times.append(time.monotonic() - began)
        if progress.startswith(READY):
            front = f"imports and checks {imports:.1f} s, launcher ({parallel.started_by}) {times[0]:.1f} s"
            progress = f"the start took {imports + times[-1]:.1f} s: {front}; {progress}"
            show = _log.info if imports + times[-1] > _SLOW_START_S else show
        show(progress)

    if can_redraw(console):
        with console.status(Text(text)) as status:
            yield partial(report, lambda progress: status.update(Text(f"{text}: {progress}")))
    else:
        _log.info(text)
        yield partial(report, _log.info)


@cache
def _until_first_start() -> float:
    """Return the seconds from the import of `logging`, one of the first, to the first start of ranks."""
    return logging.makeLogRecord({}).relativeCreated / 1e3


def print_words(console: Console, text: Text) -> None:
    """Print a text, word-wrapped on a terminal, unchanged otherwise."""
    console.print(text, soft_wrap=not console.is_terminal)


def print_files(console: Console, *files: tuple[str, Path]) -> None:
    """Print the paths of files with their descriptions."""
    for what, file in files:
        console.print(Text.assemble((f"{what:9}", "bold"), shown(file)), soft_wrap=True)


def printable(text: str) -> str:
    """Escape control characters, so that no text can control the terminal."""
    return text.translate(_CONTROL)


def shown(file: Path) -> str:
    """Return a path relative to the working directory, if it is inside."""
    return str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)


def print_throughput(console: Console, name: str, summary: Mapping[str, Any]) -> None:
    """Print a run's name and throughput."""
    print_words(console, Text.assemble((f"{name}: ", "bold"), throughput(summary)))


def throughput(summary: Mapping[str, Any]) -> str:
    """Return the requests, tokens and tokens per second of a `summary.json`."""
    return (
        f"{counted(summary['completed'], 'request')} in {seconds_text(summary['duration'])}: "
        f"{counted(summary['total_input_tokens'], 'prompt token')}, "
        f"{counted(summary['total_output_tokens'], 'output token')}, "
        f"{summary['output_throughput']:.1f} output tok/s, {summary['total_token_throughput']:.1f} tok/s in all"
    )


def versions() -> dict[str, str]:
    """Return the versions of Python and the main packages, for a run's summary."""
    found = {"python": python_version()}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
