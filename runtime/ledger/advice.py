"""Advice on a run: one change of its setting, and what that would do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with the range in which nine of ten outcomes are expected."""

    middle: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Advice:
    """One change, and by what share of the run's own value it would lower `metric`.

    Attributes:
        change: in words, as in "scheduler=equal_time" or "a link twice as fast".
        overrides: of the command line, which make the change; empty where no key does.
        command: the run's command with them; None where no key makes the change, or the command is not known.
        metric: key of `summary.json` that is lowered: `duration`, `p99_itl_ms` or `p99_ttft_ms`.
        saves: share of the metric that the change saves; negative where it costs.
        note: what a reader should know, as that another metric grows, or that the estimate goes beyond the sizes that
            the run has shown.
        is_trade: it makes another metric longer than is tolerated.
    """

    change: str
    overrides: tuple[str, ...]
    command: str | None
    metric: str
    saves: Interval
    note: str = ""
    is_trade: bool = False
