"""Streams the events of a Chrome trace, so that a file of hundreds of megabytes needs little memory."""

from __future__ import annotations

import io
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ....conf.errors import ConfigError, reason
from ....conf.row_files import gunzipped

_AT_ONCE = 1 << 20  # characters
_HEAD = 64 << 20  # maximum characters of metadata before the events
_KEY = '"traceEvents"'
_SPACE = " \t\r\n,"
_DECODER = json.JSONDecoder(strict=False)  # kernel names may contain raw tabs and newlines
# Non-finite numbers as C++ streams write them; JSON has none, and Python's decoder only accepts NaN and Infinity.
_NO_NUMBER = re.compile(r"(?<=[:\[,])(\s*)[-+]?(?:inf(?:inity)?|nan(?:\(\w*\))?)(?=\s*[,}\]])", re.IGNORECASE)


class NoTraceError(ConfigError):
    """The file is JSON, but not a trace."""


class ChromeTrace:
    """A file in Chrome's trace format, plain or gzipped: an object with `traceEvents`, or the list of events alone.

    Attributes:
        metadata: the object's other keys; complete once all events have been read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events in the file's order.

        Raises:
            ConfigError: the file cannot be read, is not a Chrome trace, or is truncated.
        """
        try:
            with self.path.open("rb") as file:
                yield from self._read(io.TextIOWrapper(gunzipped(file), encoding="utf-8-sig", errors="replace"))
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigError(f"{self.path}: unreadable trace, damaged or truncated ({reason(error)})") from error

    def _read(self, file: IO[str]) -> Iterator[dict[str, Any]]:
        head = file.read(_AT_ONCE)
        if head.lstrip()[:1] not in ("{", "["):
            raise ConfigError(f"{self.path}: not a Chrome trace: it is not JSON")
        rest, before = head.lstrip(), ""
        if rest[0] == "{":
            while (place := rest.find(_KEY)) < 0:
                more = file.read(_AT_ONCE)
                if not more or len(rest) > _HEAD:
                    raise NoTraceError(f"{self.path}: not a Chrome trace: it has no traceEvents")
                rest += more
            before, rest = rest[:place], rest[place + len(_KEY) :]
        while "[" not in rest and (more := file.read(_AT_ONCE)):
            rest += more
        rest = rest[rest.find("[") + 1 :]
        decode, end = _DECODER.raw_decode, 0
        while True:
            while end < len(rest) and rest[end] in _SPACE:
                end += 1
            if end < len(rest) and rest[end] == "]":
                break
            try:
                event, end = decode(rest, end)
            except ValueError:  # the event is incomplete so far, or contains a non-finite number
                rest, end = rest[end:], 0
                if (numbers := _with_nan(rest)) != rest:
                    rest = numbers
                    continue
                more = file.read(_AT_ONCE)
                if not more:
                    raise ConfigError(f"{self.path}: damaged or truncated: its list of events does not end") from None
                rest += more
                continue
            if isinstance(event, dict):
                yield event
        tail = rest[end + 1 :] + file.read()
        if before:
            try:
                self.metadata = _DECODER.decode(_with_nan(before + _KEY + ":[]" + (tail if tail.strip() else "}")))
            except ValueError:
                raise ConfigError(f"{self.path}: damaged or truncated after its events") from None


def _with_nan(text: str) -> str:
    """Return JSON with non-finite numbers replaced by NaN."""
    return _NO_NUMBER.sub(r"\1NaN", text)
