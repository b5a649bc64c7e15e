"""Finds the highest request rate that meets an SLO, by bisection, on one seed or several."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ....conf.tuning import TailSlo
from ..pipeline.setting import Setting
from .bounds import Bounds, TokenSeconds
from .demand import Demand
from .paired import LEVEL, half_width
from .trial import Trial, try_rate

LOWEST_SHARE = 1 / 4096  # of the bound: lower rates are not tried
_PROBES = (0.9, 0.75)  # shares of the found rate that must be carried too, else it passed by luck

Try = Callable[[float], Trial]


@dataclass(frozen=True, slots=True)
class Capacity:
    """The highest request rate that a setting carries. Rates are requests/s.

    Attributes:
        rate: The rate; 0 if none is carried.
        above: A higher rate that is not carried, within the precision of the search.
        trial: The trial of `rate`.
        limit: The trial of `above`, with the reason why it is not carried.
        trials: All trials of the search.
        not_monotone: A rate above `rate` passed too, but one between them did not.
    """

    rate: float
    above: float
    trial: Trial | None
    limit: Trial | None
    trials: tuple[Trial, ...] = ()
    not_monotone: bool = False

    @property
    def requests(self) -> int:
        """How many requests were simulated to find it."""
        return sum(trial.requests for trial in self.trials)

    @property
    def why(self) -> str:
        """Why it is not higher; empty if that is not known."""
        return self.limit.why if self.limit is not None else ""


@dataclass(slots=True)
class Bracket:
    """Two rates that bracket the capacity; trials narrow them. Rates are requests/s.

    Attributes:
        try_rate: Makes a trial at a rate.
        high: A rate that is not carried, initially an upper bound.
        low: A rate that is carried, initially 0.
        trials: All trials so far.
        low_trial: The trial of `low`.
        high_trial: The trial of `high`; None while that is the bound.
        lowest: Rates below it are not tried.
    """

    try_rate: Try
    high: float
    low: float = 0.0
    trials: list[Trial] = field(default_factory=list)
    low_trial: Trial | None = None
    high_trial: Trial | None = None
    lowest: float = 0.0

    def __post_init__(self) -> None:
        self.lowest = self.lowest or LOWEST_SHARE * self.high

    def test(self, rate: float) -> bool:
        """Return whether `rate` is carried. A trial runs only if `low` and `high` do not imply the answer."""
        if rate <= self.low:
            return True
        if rate >= self.high:
            return False
        trial = self.try_rate(rate)
        self.trials.append(trial)
        if trial.carried:
            self.low, self.low_trial = rate, trial
        else:
            self.high, self.high_trial = rate, trial
        return trial.carried

    def climb(self, rate: float, factor: float) -> None:
        """Step up or down from a guess, by growing factors, until two trials bracket the capacity."""
        if self.test(rate):
            while rate * factor < self.high and self.test(rate := rate * factor):
                factor *= factor
        else:
            while self.low == 0.0 and self.high > self.lowest:
                self.test(self.high / factor)
                factor *= factor

    def narrow(self, precision: float) -> None:
        """Bisect until `high` is within the share `precision` of `low`, or no rate is carried."""
        while self.low == 0.0 and self.high > self.lowest:
            self.test(self.high / 2)
        while 0.0 < self.low * (1 + precision) < self.high:
            self.test(math.sqrt(self.low * self.high))

    def capacity(self, not_monotone: bool = False) -> Capacity:
        """Return `low` as the capacity."""
        return Capacity(self.low, self.high, self.low_trial, self.high_trial, tuple(self.trials), not_monotone)


def make_bracket(try_rate: Try, bound: float, demand: Demand, lowest: float = 0.0) -> Bracket:
    """Make the initial bracket of a capacity search. For a closed loop, one trial determines the capacity."""
    if demand.clients is None:
        return Bracket(try_rate, bound, lowest=lowest)
    trial = try_rate(bound)
    if not trial.carried:
        return Bracket(try_rate, 0.0, trials=[trial], high_trial=trial)
    limit = replace(trial, why="all clients wait for answers")
    return Bracket(try_rate, trial.rate, trial.rate, [trial], trial, limit)


def find_capacity(try_rate: Try, bound: float, precision: float, *, guess: float | None = None) -> Capacity:
    """Find the highest rate below `bound` that is carried.

    Tails usually grow with the rate, but in a finite run not always. So rates somewhat below the found one are tried
    too. If one of them is not carried, the search continues below it.

    Args:
        try_rate: Makes a trial at a rate.
        bound: A rate that cannot be carried, in requests/s.
        precision: The rate is found to within this share.
        guess: The rate to start at, in requests/s.
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
                highest = max(below, key=lambda t: t.rate, default=None)
                bracket.high, bracket.high_trial = trial.rate, trial
                bracket.low, bracket.low_trial = (highest.rate, highest) if highest is not None else (0.0, None)
                bracket.narrow(precision)
                break
    return bracket.capacity(not_monotone)


@dataclass(frozen=True, slots=True)
class ConfidenceInterval:
    """The mean capacity over several seeds, with its 95% confidence interval by Student's t. Rates are requests/s.

    Attributes:
        mean: The mean.
        half: Half the width of the interval; None for a single seed.
        lowest, highest: The extremes over the seeds.
    """

    mean: float
    half: float | None
    lowest: float
    highest: float

    @classmethod
    def from_rates(cls, rates: Sequence[float]) -> ConfidenceInterval:
        """Compute the interval of the capacities `rates`, one for each seed; at least one."""
        assert rates
        mean = sum(rates) / len(rates)
        half = half_width(rates, LEVEL) if len(rates) > 1 else None
        return cls(mean, half, min(rates), max(rates))

    @property
    def text(self) -> str:
        """The interval as text, in requests/s: `12.3 ± 0.4`."""
        digits = max(0, 2 - math.floor(math.log10(self.mean))) if self.mean > 0 else 0
        around = "" if self.half is None else f" ± {self.half:.{digits}f}"
        return f"{self.mean:.{digits}f}{around}"


@dataclass(slots=True)
class SeededCapacities:
    """The capacities of several settings on the seeds of a workload, each found on first use.

    On a seed, all settings get the same requests, with the same gaps scaled by the rate.

    Attributes:
        settings: The settings.
        demands: The workload of each seed.
        slo: Bounds of the tail latencies.
        precision: Each capacity is found to within this share.
        guesses: Starting rate of each setting, in requests/s; empty: none is known.
        token_times: Times that all `Bounds` share.
        on_trial: Called with the number of the setting and each of its trials.
        found: The capacities of each setting so far, by seed.
    """

    settings: Sequence[Setting]
    demands: Sequence[Demand]
    slo: TailSlo
    precision: float
    guesses: Sequence[float] = ()
    token_times: TokenSeconds = field(default_factory=dict)
    on_trial: Callable[[int, Trial], None] = lambda number, trial: None
    found: list[list[Capacity]] = field(init=False)

    def __post_init__(self) -> None:
        self.found = [[] for _ in self.settings]

    def __call__(self, number: int, seed: int) -> Capacity:
        """Return the capacity of setting `number` on a seed; finds those of earlier seeds first."""
        found = self.found[number]
        while len(found) <= seed:
            found.append(self._find(number, len(found)))
        return found[seed]

    def rate(self, number: int, seed: int) -> float:
        """Return the capacity of setting `number` on a seed, in requests/s."""
        return self(number, seed).rate

    def _find(self, number: int, seed: int) -> Capacity:
        """Find a capacity. The search starts at the previous seed's rate."""
        setting, demand = self.settings[number], self.demands[seed]

        def attempt(rate: float) -> Trial:
            trial = try_rate(setting, demand, rate, self.slo, seed)
            self.on_trial(number, trial)
            return trial

        bound = Bounds(demand, self.slo, self.token_times)(setting)
        if bound.rate == 0.0:
            return Capacity(0.0, 0.0, None, Trial(0.0, bound.why, 0))
        if demand.clients is not None:
            return make_bracket(attempt, bound.rate, demand).capacity()
        guess = self.guesses[number] if self.guesses else None
        latest = next((capacity.rate for capacity in reversed(self.found[number]) if capacity.rate), guess)
        return find_capacity(attempt, bound.rate, self.precision, guess=latest)
