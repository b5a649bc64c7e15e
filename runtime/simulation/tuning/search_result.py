"""The result of a search: every candidate that was tried, the finalists, and the winner."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from ..cost.error import CostError
from .bounds import Bound
from .capacity import Capacity, ConfidenceInterval
from .closest import Approach
from .demand import Demand
from .error_range import ErrorRange
from .paired import Difference, Verdict
from .space import Candidate, Misfit
from .trial import Trial


@dataclass(slots=True)
class TriedCandidate:
    """What the search knows about a candidate. Rates are requests/s.

    Attributes:
        candidate: The candidate.
        bound: The rate that no schedule exceeds.
        reached: Name of the last rung that the candidate took part in.
        rung: Name of the last rung on which its rate was found.
        low: The highest rate that it carried there.
        high: A rate above `low` that it did not carry there, or that its bound excludes.
        expected: Its expected rate: its own from the previous rung, or for a new variant the rate of its original.
        why: Why it left the race; empty while it is in it.
        low_trial: The trial of `low`.
        requests: Requests that were simulated for it.
    """

    candidate: Candidate
    bound: Bound
    reached: str = ""
    rung: str = ""
    low: float = 0.0
    high: float = 0.0
    expected: float = 0.0
    why: str = ""
    low_trial: Trial | None = None
    requests: int = 0


@dataclass(slots=True, kw_only=True)
class Ranked:
    """A setting with its capacity for each seed, compared with others.

    Attributes:
        capacities: Its capacity for each seed, the workload's own first.
        behind: How much more the setting with the highest mean carries, over the seeds that both ran.
        verdict: The verdict against that setting.
        off: Its capacity at both ends of the cost model's error; None if the error is not known.
    """

    capacities: list[Capacity]
    behind: Difference
    verdict: Verdict
    off: ErrorRange | None = None

    @property
    def rate(self) -> float:
        """The capacity on the workload's own seed, in requests/s."""
        return self.capacities[0].rate

    @property
    def interval(self) -> ConfidenceInterval:
        """The mean capacity over the seeds, with its confidence interval."""
        return ConfidenceInterval.from_rates([capacity.rate for capacity in self.capacities])

    @property
    def known(self) -> dict[str, Any]:
        """The candidate's entry in a JSON file; rates are requests/s."""
        return {
            "mean": self.interval.mean,
            "half_width_95": self.interval.half,
            "if_times_are_off": None if self.off is None else asdict(self.off),
            "by_seed": [capacity.rate for capacity in self.capacities],
            "verdict": self.verdict,
            "less_than_best": asdict(self.behind),
            "limit": self.capacities[0].why,
        }


@dataclass(slots=True, kw_only=True)
class Finalist(Ranked):
    """A candidate whose capacity was found on the whole workload.

    Attributes:
        candidate: The candidate.
        numbers: Summary of a run at its capacity, on the workload's own seed.
    """

    candidate: Candidate
    numbers: dict[str, Any]


R = TypeVar("R", bound=Ranked)


def tied(ranked: Iterable[R]) -> list[R]:
    """Return the setting with the highest mean and those tied with it; empty if it is alone."""
    found = [each for each in ranked if each.verdict != "less"]
    return found if len(found) > 1 else []


@dataclass(slots=True)
class SearchResult:
    """The result of a search.

    Attributes:
        tried: Every candidate that was tried.
        misfits: Grids that cannot hold the model.
        finalists: The best candidates, the preferred one first.
        chunks: The winner with each chunk, and its capacity.
        carried: Every trial on the whole workload that was carried, and its candidate.
        demands: The workload of each seed.
        asked: The workload's own request rate; None if it has none.
        simulations: Simulations of the search itself.
        requests: Requests that these simulated.
        confirming_requests: Requests that were simulated after the search, for the other seeds and for `chunks`.
        error: Error range of stage times; None: not known.
        closest: If no setting meets the SLO, those that come closest, the closest first.
    """

    tried: list[TriedCandidate]
    misfits: list[Misfit]
    finalists: list[Finalist]
    chunks: list[tuple[Candidate, Capacity]]
    carried: list[tuple[Candidate, Trial]]
    demands: list[Demand]
    asked: float | None
    simulations: int
    requests: int
    confirming_requests: int
    error: CostError | None = None
    closest: list[Approach] = field(default_factory=list)

    @property
    def ties(self) -> list[Finalist]:
        """The finalist with the highest mean and those tied with it; empty if it is alone."""
        return tied(self.finalists)

    @property
    def winner(self) -> Finalist | None:
        """The finalist to choose; None if no setting meets the SLO at any rate."""
        return self.finalists[0] if self.finalists else None
