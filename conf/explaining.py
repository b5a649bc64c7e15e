"""The keys of `gapless explain`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .errors import check


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainConfig:
    """`gapless explain FOLDER [KEY=VALUE ...]`: what would change a run, and by how much.

    Keys that are not these are the run's own, to try: `scheduler.chunk=256,512`.
    """

    run: tuple[str, ...] = ()
    """the run folder; the bare argument"""
    changes: tuple[str, ...] = ()
    """keys of scheduler, parallel and cache to try together, given as they are (scheduler.chunk=512); of several values
    (scheduler.chunk=256,512) each is tried; none: what may matter is found and tried"""
    objective: Literal["auto", "duration", "p99_itl_ms", "p99_ttft_ms"] = "auto"
    """the key of summary.json by which changes are ranked; auto: the duration, or where arrivals bound it, p99 TTFT if
    requests had to wait for admission, else p99 TBT"""
    tolerance: float = 0.5
    """share by which another metric may grow (0.5: half as long again): changes beyond that rank last, as trades; inf:
    none is one"""
    seeds: int = 10
    """replays of each of the best changes, with other noise"""
    seconds: float = 30.0
    """how long the replays take at most, about: with less time fewer changes and seeds, and of a long run only the
    first requests"""
    out: str | None = None
    """folder for explain.json; null: the run folder"""

    def __post_init__(self) -> None:
        check("tolerance", self.tolerance, self.tolerance >= 0, "0 or more")
        check("seeds", self.seeds, 3 <= self.seeds <= 1000, "3 to 1000")
        check("seconds", self.seconds, 0 < self.seconds <= 1e6, "above 0, at most 1e6")
