"""Log messages of the command and its child processes: one line each on standard error, as text or JSON."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TextIO

PROGRAM = "gapless"
FIELDS = "fields"  # attribute of a log record with structured fields


class _OneLine(logging.Formatter):
    """Formats `gapless: TEXT` for info, and `gapless: warning: TEXT` and the like for other levels.

    A record with fields has its time before the text and the fields after it.
    """

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        text = " ".join(super().format(record).splitlines())
        if fields := getattr(record, FIELDS, None):
            text = " ".join([_time(record), text, *(f"{name}={one_word(value)}" for name, value in fields.items())])
        return f"{PROGRAM}: {level}{text}"


class _Json(logging.Formatter):
    """Formats a record as a JSON object in one line: time, level, logger, message, fields and traceback."""

    def format(self, record: logging.LogRecord) -> str:
        found = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            found["traceback"] = self.formatException(record.exc_info)
        return json.dumps(found, ensure_ascii=False)


def _time(record: logging.LogRecord) -> str:
    """Return the time of a record in UTC."""
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def one_word(value: object) -> str:
    """Return a value as one word, so that client input cannot look like another field or line."""
    text = str(value)
    return text if text.isascii() and text.isprintable() and not set(text) & set(' "=') else repr(text)


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`, which rich replaces while a progress bar is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


@contextmanager
def messages_on_stderr() -> Iterator[None]:
    """Log to standard error only, as hydra's handlers would repeat messages.

    Nested contexts have no effect.
    """
    logger = logging.getLogger(PROGRAM)
    if any(isinstance(handler, _StandardError) for handler in logger.handlers):
        yield
        return
    handler = _StandardError()
    handler.setFormatter(_OneLine())
    level, propagates = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates


@contextmanager
def as_configured(level: str, form: str) -> Iterator[None]:
    """Within `messages_on_stderr`, set the log level and the format, "text" or "json"; JSON includes uvicorn's logs."""
    logger, of_server = logging.getLogger(PROGRAM), logging.getLogger("uvicorn")
    handlers = [handler for handler in logger.handlers if isinstance(handler, _StandardError)]
    before = logger.level, [handler.formatter for handler in handlers]
    logger.setLevel(level.upper())
    for handler in handlers:
        if form == "json":
            of_server.addHandler(handler)
        handler.setFormatter(_Json() if form == "json" else _OneLine())
    try:
        yield
    finally:
        logger.setLevel(before[0])
        for handler, formatter in zip(handlers, before[1], strict=True):
            handler.setFormatter(formatter)
            of_server.removeHandler(handler)
