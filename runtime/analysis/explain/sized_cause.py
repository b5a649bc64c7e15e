"""A cause with what it costs a run: the run less its twin without that cause. Data only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .roots import Root

COMPUTE = "compute"  # beside the ledger's causes, in `SizedCause.shows`
_LEAST_PART = 0.001  # of stage time: a smaller part of an idle time is not listed by its root


@dataclass(frozen=True, slots=True)
class SizedCause:
    """What one cause costs a run, by a replay of the run without it.

    Attributes:
        cause: the root cause.
        seconds: of the run's metric (its duration, or a tail latency where arrivals bound the duration): the run less
            its twin without the cause.
        low, high: the range that holds nine of ten outcomes of the same comparison.
        share: `seconds` over the run's own value of the metric.
        stage: where the cause is one stage, its number.
        shows: stage-seconds by the ledger's immediate causes, and `compute`, that go with the cause. Together they are
            `seconds` times the number of stages where the metric is the duration.
        evidence: numbers that show the cause, by name.
        change: the best change of the run's setting that undoes the cause, for people; empty where no key does.
        overrides: of the command line, which make the change.
        saves_seconds: of the metric, by a replay with the change.
        where: of several replicas the one on which it is, as people read it.
        says: what shows the cause, where numbers alone do not say it.
        note: what the change costs otherwise, as a longer tail.
    """

    cause: Root
    seconds: float
    low: float
    high: float
    share: float
    stage: int | None = None
    shows: Mapping[str, float] = field(default_factory=dict)
    evidence: Mapping[str, float] = field(default_factory=dict)
    change: str = ""
    overrides: tuple[str, ...] = ()
    saves_seconds: float = 0.0
    note: str = ""
    where: str = ""
    says: str = ""

    @property
    def summary(self) -> dict[str, Any]:
        """What `summary.json` holds of it."""
        found = {"cause": str(self.cause), "seconds": self.seconds, "low": self.low, "high": self.high}
        found |= {"share": self.share, "change": self.change or None, "saves_seconds": self.saves_seconds}
        return found if self.stage is None else found | {"stage": self.stage}


def parts(causes: Sequence[SizedCause], shown: str, stage_seconds: float) -> Iterator[tuple[SizedCause, float]]:
    """Yield the causes that an idle time, or compute, comes from in part, each with the stage-seconds of that part."""
    for each in causes:
        if abs(seconds := each.shows.get(shown, 0.0)) >= _LEAST_PART * stage_seconds:
            yield each, seconds
