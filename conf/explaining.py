"""The keys of `gapless explain`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from .ranges import NOT_NEGATIVE, Within, check_ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainConfig:
    """`gapless explain FOLDER [KEY=VALUE ...]`: which changes would improve a run, and by how much.

    Any other key is a change of the run to try: `scheduler.chunk=256,512`.
    """

    run: tuple[str, ...] = ()
    """the run folder; the positional argument"""
    changes: tuple[str, ...] = ()
    """changes to try, given directly as KEY=VALUE of scheduler, parallel and cache (scheduler.chunk=512); of several
    values each is tried (scheduler.chunk=256,512); none: candidates are found automatically"""
    objective: Literal["auto", "duration", "p99_itl_ms", "p99_ttft_ms"] = "auto"
    """metric of summary.json that ranks the changes; auto: the duration; if arrivals bound it, p99 TTFT if requests
    waited for admission, else p99 TBT"""
    tolerance: Annotated[float, NOT_NEGATIVE] = 0.5
    """share by which other metrics may worsen (0.5: by half); changes beyond that rank last, as trade-offs; inf: no
    limit"""
    seeds: Annotated[int, Within(3, 1000)] = 10
    """replays of each of the best changes, with different noise"""
    seconds: Annotated[float, Within(0, 1_000_000, open=True)] = 30.0
    """approximate time limit of all replays; a lower limit tries fewer changes and seeds, and replays only the first
    requests of a long run"""
    out: str | None = None
    """output folder for explain.json; null: the run folder"""

    def __post_init__(self) -> None:
        check_ranges(self)
