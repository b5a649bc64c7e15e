"""The explanation of a run: what its replay is off by, and what changes of its setting would do. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .sized_cause import SizedCause

# What changes are judged by: keys of summary.json, and their names.
METRIC_NAMES = {"duration": "duration", "p99_itl_ms": "p99 TBT", "p99_ttft_ms": "p99 TTFT"}
METRICS = tuple(METRIC_NAMES)
TOLERANCE = 0.5  # share by which another metric may grow, by default, before a change is a trade


def seconds_of(values: Mapping[str, float], metric: str) -> float:
    """Return the value of a metric in seconds."""
    return values[metric] / (1.0 if metric == "duration" else 1e3)


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with the range in which nine of ten outcomes are expected."""

    middle: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a change of a run's setting would do.

    Attributes:
        change: as keys, for people: "scheduler=equal_time".
        overrides: of the command line, which make the change.
        command: the run's command with them; None where it is not known.
        saves: by metric, the share of the run's own value that the change saves; negative where it costs.
        note: what a reader should know: other metrics that grow, sizes that the run has not shown.
        beyond: share of its compute time in micro-batches of sizes that the run has not shown, where times are learned.
        is_trade: it makes another metric longer than is tolerated.
        families: what the change is of, as `Change.families`.
    """

    change: str
    overrides: tuple[str, ...]
    command: str | None
    saves: Mapping[str, Interval]
    note: str = ""
    beyond: float = 0.0
    is_trade: bool = False
    families: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a run's replay is off by, and what changes would do, the best first.

    Attributes:
        metric: by which changes are ranked.
        run: the run's own value of each metric.
        error: by metric, the replay of the run as it was against the run: replayed / measured - 1.
        outcomes: changes that were replayed: those that are sure to save by the low end, then the others.
        worse: changes that would not help, without seeds: the one of each kind that costs least.
        requests: of the run. replayed: the first of them, which were replayed.
        seeds: replays of each change.
        notes: what the replay leaves out or assumes, a line each.
        causes: that are worth mending, the largest first.
        left: causes for which no time was left, as people read them.
        tried: how many changes were replayed.
        left_changes: those for which no time was left.
        refused: changes that do not fit or cannot be foretold, with why.
    """

    metric: str
    run: Mapping[str, float]
    error: Mapping[str, float]
    outcomes: tuple[Outcome, ...]
    worse: tuple[Outcome, ...]
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
        """The changes that are worth making: nine of ten outcomes save something."""
        return [outcome for outcome in self.outcomes if outcome.saves[self.metric].low > 0]

    @property
    def best(self) -> Outcome | None:
        """The change with the highest low end; None where no change is worth making."""
        return next(iter(self.advices), None)
