"""Switches Python's garbage collector off while millions of records are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
