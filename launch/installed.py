"""Says whether runs can be analysed here: serving works without the rooms that simulate and analyse."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec


@cache
def has_analysis() -> bool:
    """Return whether reports, the live page, recordings and the ledger's metrics can be made."""
    return find_spec("gapless.runtime.analysis") is not None
