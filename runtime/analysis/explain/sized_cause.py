"""A cause with its cost: the run minus a replay of its twin without that cause. Data only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .roots import Root

COMPUTE = "compute"  # key in `SizedCause.shows`, alongside the ledger's causes
_LEAST_PART = 0.001  # of stage time: smaller parts of an idle cause are not attributed to a root


@dataclass(frozen=True, slots=True)
class SizedCause:
    """The cost of one cause, by a replay of the run without it.

    Attributes:
        cause: the root cause.
        seconds: difference in the run's metric (its duration, or a tail latency if arrivals bound the duration): the
            run minus its twin without the cause.
        low, high: the 90% interval of `seconds`.
        share: `seconds` over the run's own value of the metric.
        stage: the stage, if the cause is a single stage.
        shows: stage-seconds due to the cause, by the ledger's immediate causes, and `compute`. If the metric is the
            duration, they sum to `seconds` times the number of stages.
        evidence: numbers that show the cause, by name.
        change: the best change of the run's setting that fixes the cause, for display; empty if no key does.
        overrides: command-line overrides that make the change.
        saves_seconds: seconds of the metric saved, by a replay with the change.
        where: display name of the replica with the cause, for several replicas.
        says: evidence in words, if numbers alone do not show it.
        note: side effects of the change, such as a longer tail.
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
        """The cause's entry in `summary.json`."""
        found = {"cause": str(self.cause), "seconds": self.seconds, "low": self.low, "high": self.high}
        found |= {"share": self.share, "change": self.change or None, "saves_seconds": self.saves_seconds}
        return found if self.stage is None else found | {"stage": self.stage}


def parts(causes: Sequence[SizedCause], shown: str, stage_seconds: float) -> Iterator[tuple[SizedCause, float]]:
    """Yield the causes that account for part of an idle cause, or of compute, each with the stage-seconds."""
    for each in causes:
        if abs(seconds := each.shows.get(shown, 0.0)) >= _LEAST_PART * stage_seconds:
            yield each, seconds
