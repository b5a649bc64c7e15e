"""Disables Python's garbage collector while millions of records are created."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_FROZEN_BY_PYTHON = 1_000  # upper bound: Python 3.12 starts with 375, others with 0; a program's gc.freeze() exceeds it


@contextmanager
def without_collector() -> Iterator[None]:
    """Disable the collector: run records form no cycles, yet it would traverse all of them repeatedly.

    Objects created meanwhile join the oldest generation, as if they had survived collections.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if gc.get_freeze_count() < _FROZEN_BY_PYTHON:
                gc.freeze()
                gc.unfreeze()
            gc.enable()
