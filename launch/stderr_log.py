"""Messages of the command line and of the processes that it starts: a line each on standard error."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

PROGRAM = "gapless"


class _OneLine(logging.Formatter):
    """Makes `gapless: TEXT` of what is usual, and `gapless: warning: TEXT` and the like of any other level."""

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        return f"{PROGRAM}: {level}{' '.join(super().format(record).splitlines())}"


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is now: while a bar moves, rich puts a file there that writes above it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


@contextmanager
def messages_on_stderr() -> Iterator[None]:
    """Write what the package logs to standard error, and nowhere else: hydra's handlers would write it again.

    Within another such context it changes nothing.
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
