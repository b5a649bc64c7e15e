"""The explanation of a run: the error of its replay, and the predicted effects of changes of its setting. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .sized_cause import SizedCause

# The metrics that changes are judged by: keys of summary.json, and their names.
METRIC_NAMES = {"duration": "duration", "p99_itl_ms": "p99 TBT", "p99_ttft_ms": "p99 TTFT"}
METRICS = tuple(METRIC_NAMES)
TOLERANCE = 0.5  # share by which another metric may grow, by default, before a change is a trade


def seconds_of(values: Mapping[str, float], metric: str) -> float:
    """Return the value of a metric in seconds."""
    return values[metric] / (1.0 if metric == "duration" else 1e3)


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 90% interval."""

    middle: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """The predicted effect of a change of a run's setting.

    Attributes:
        change: as keys, for display: "scheduler=equal_time".
        overrides: command-line overrides that make the change.
        command: the run's command with them; None if unknown.
        saves: by metric, the share of the run's own value that the change saves; negative if it costs.
        note: caveats: other metrics that grow, sizes that the run has not shown.
        beyond: share of its compute time in micro-batches of sizes that the run has not shown, if times are learned.
        is_trade: another metric grows beyond the tolerance.
        family: see `Change.family`.
    """

    change: str
    overrides: tuple[str, ...]
    command: str | None
    saves: Mapping[str, Interval]
    note: str = ""
    beyond: float = 0.0
    is_trade: bool = False
    family: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The error of a run's replay, and the predicted effects of changes, best first.

    Attributes:
        metric: the metric by which changes are ranked.
        run: the run's own value of each metric.
        error: by metric, of the replay of the unchanged run: replayed / measured - 1.
        outcomes: replayed changes: first those whose saving has a low end above 0, then the others.
        requests: number of the run's requests. replayed: how many of them, from the first, were replayed.
        seeds: replays per change.
        notes: simplifications and assumptions of the replay, one line each.
        causes: causes worth fixing, largest first.
        left: causes skipped for lack of time, as display names.
        tried: how many changes were replayed.
        left_changes: changes skipped for lack of time.
        refused: changes that do not fit or cannot be predicted, with the reason.
    """

    metric: str
    run: Mapping[str, float]
    error: Mapping[str, float]
    outcomes: tuple[Outcome, ...]
    requests: int
    replayed: int
    seeds: int
    notes: tuple[str, ...] = ()
    causes: tuple[SizedCause, ...] = ()
    left: tuple[str, ...] = ()
    tried: int = 0
    left_changes: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def value(self) -> float:
        """The run's own value of the metric, in seconds."""
        return seconds_of(self.run, self.metric)

    @property
    def advices(self) -> list[Outcome]:
        """The changes worth making: the low end of their saving is above 0."""
        return [outcome for outcome in self.outcomes if outcome.saves[self.metric].low > 0]

    @property
    def best(self) -> Outcome | None:
        """The first of the changes worth making; None if there is none."""
        return next(iter(self.advices), None)
