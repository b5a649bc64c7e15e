"""Python's garbage collector, out of the way of what makes millions of records."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """No record of a run is part of a cycle, and the collector would go through all of them again and again.

    What has been made meanwhile is then among the old objects, as if the collector had looked at it.
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
