"""Switches Python's garbage collector off while millions of records are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_FROZEN_BY_PYTHON = 1_000  # objects at most: 3.12 starts with 375, others with none; a program's gc.freeze() takes more


@contextmanager
def without_collector() -> Iterator[None]:
    """Switch the collector off: no record of a run is part of a cycle, yet it would traverse all of them repeatedly.

    Objects made meanwhile join the oldest generation, as if the collector had visited them.
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
