"""The highest request rate that meets an SLO: bisection, with its confidence from seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...conf.tuning import TailSlo
from ..simulation.setting import Setting
from .bounds import Bounds, TokenSeconds
from .demand import Demand
from .trial import Trial, try_rate

_LEAST = 1 / 4096  # of the bound: a lower rate is none that one asks for
_PROBES = (0.9, 0.75)  # of what was found: a rate below it that is not carried says that it was luck
# Two-sided 95% quantiles of Student's t for 1, 2, ... degrees of freedom.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045,
)  # fmt: skip

Try = Callable[[float], Trial]


@dataclass(frozen=True, slots=True)
class Capacity:
    """`rate` requests/s are carried, `above` are not; 0 where none is. `at`: the trial of `rate`; `limit`: that of
    `above`, whose `why` says what the limit is. `not_monotone`: a
    higher rate passed, but one between did not."""

    rate: float
    above: float
    at: Trial | None
    limit: Trial | None
    trials: tuple[Trial, ...] = ()
    not_monotone: bool = False

    @property
    def requests(self) -> int:
        """That were simulated to find it."""
        return sum(trial.requests for trial in self.trials)

    @property
    def why(self) -> str:
        """What keeps it from more."""
        return self.limit.why if self.limit is not None else ""


@dataclass(slots=True)
class Bracket:
    """Rates between which the capacity lies, narrowed trial by trial.

    `low` is carried, `high` is not (or is a bound that nothing exceeds).
    """

    try_rate: Try
    high: float
    low: float = 0.0
    trials: list[Trial] = field(default_factory=list)
    at: Trial | None = None
    limit: Trial | None = None
    least: float = 0.0  # rates below it are not tried

    def __post_init__(self) -> None:
        self.least = self.least or _LEAST * self.high

    def test(self, rate: float) -> bool:
        """Whether `rate` is carried; known ones are not tried again."""
        if rate <= self.low:
            return True
        if rate >= self.high:
            return False
        trial = self.try_rate(rate)
        self.trials.append(trial)
        if trial.carried:
            self.low, self.at = rate, trial
        else:
            self.high, self.limit = rate, trial
        return trial.carried

    def climb(self, rate: float, step: float) -> None:
        """From a guess up or down, in steps that grow, until the capacity lies in between."""
        if self.test(rate):
            while rate * step < self.high and self.test(rate := rate * step):
                step *= step
        else:
            while self.low == 0.0 and self.high > self.least:
                self.test(self.high / step)
                step *= step

    def narrow(self, precision: float) -> None:
        """Bisect until `high` is within the share `precision` of `low`, or no rate is carried."""
        while self.low == 0.0 and self.high > self.least:
            self.test(self.high / 2)
        while 0.0 < self.low * (1 + precision) < self.high:
            self.test(math.sqrt(self.low * self.high))

    def capacity(self, not_monotone: bool = False) -> Capacity:
        return Capacity(self.low, self.high, self.at, self.limit, tuple(self.trials), not_monotone)


def find_capacity(try_rate: Try, bound: float, precision: float, *, guess: float | None = None) -> Capacity:
    """The highest rate under `bound` that `try_rate` carries, to within the share `precision`.

    More load makes tails longer, but in a finite run not strictly. So rates somewhat below what was found are tried
    too; where one of them is not carried, the search goes on below it.

    Args:
        guess: where to begin.
    """
    bracket = Bracket(try_rate, bound)
    if guess is not None and guess < bound:
        bracket.climb(guess, 1 + 4 * precision)
    bracket.narrow(precision)
    not_monotone = False
    tried = 0.0
    while bracket.low > 0.0 and bracket.low != tried:
        tried = bracket.low
        for share in _PROBES:
            trial = try_rate(tried * share)
            bracket.trials.append(trial)
            if not trial.carried:
                not_monotone = True
                below = [t for t in bracket.trials if t.carried and t.rate < trial.rate]
                at = max(below, key=lambda t: t.rate, default=None)
                bracket.high, bracket.limit = trial.rate, trial
                bracket.low, bracket.at = (at.rate, at) if at is not None else (0.0, None)
                bracket.narrow(precision)
                break
    return bracket.capacity(not_monotone)


@dataclass(frozen=True, slots=True)
class Interval:
    """Of the capacities of several seeds: the mean, and half the width of its 95% confidence interval (Student's t);
    None for a single seed."""

    mean: float
    half: float | None
    least: float
    most: float

    @classmethod
    def of(cls, rates: Sequence[float]) -> Interval:
        assert rates
        mean = sum(rates) / len(rates)
        half = None
        if len(rates) > 1:
            deviation = math.sqrt(sum((rate - mean) ** 2 for rate in rates) / (len(rates) - 1))
            half = _T95[len(rates) - 2] * deviation / math.sqrt(len(rates))
        return cls(mean, half, min(rates), max(rates))

    @property
    def text(self) -> str:
        """`12.3 ± 0.4`, in requests/s."""
        digits = max(0, 2 - math.floor(math.log10(self.mean))) if self.mean > 0 else 0
        around = "" if self.half is None else f" ± {self.half:.{digits}f}"
        return f"{self.mean:.{digits}f}{around}"


def capacities(
    setting: Setting,
    demands: Sequence[Demand],
    slo: TailSlo,
    precision: float,
    *,
    guess: float | None = None,
    known: TokenSeconds | None = None,
    told: Callable[[Trial], None] = lambda trial: None,
) -> list[Capacity]:
    """A setting's capacity for each of the seeds' demands; each starts from what was found for the one before.

    Args:
        known: what `Bounds` keeps. told: hears of each trial.
    """
    found: list[Capacity] = []
    for seed, demand in enumerate(demands):

        def attempt(rate: float, seed: int = seed, demand: Demand = demand) -> Trial:
            trial = try_rate(setting, demand, rate, slo, seed)
            told(trial)
            return trial

        bound = Bounds(demand, slo, known)(setting)
        if bound.rate == 0.0:
            found.append(Capacity(0.0, 0.0, None, Trial(0.0, bound.why, 0)))
            continue
        near = next((capacity.rate for capacity in reversed(found) if capacity.rate), guess)
        found.append(find_capacity(attempt, bound.rate, precision, guess=near))
    return found
