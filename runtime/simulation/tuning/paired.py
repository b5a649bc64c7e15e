"""Compares settings by their capacities on the same seeds, with more seeds until they differ or the seeds run out.

On a seed, all settings get the same requests, with the same gaps scaled by the rate (common random numbers). Effects of
a seed that settings share cancel in their difference, so the paired t interval of the differences is much narrower than
the intervals of the two means.

Testing after every seed, and several settings, raises the rate of false positives. So the level is divided (Bonferroni)
by the maximum number of looks and by the number of settings other than the leader. With normal differences, the truly
best setting is then ranked below another in at most LEVEL / 2 of all searches, and among equal settings a single one is
called the best in at most LEVEL of them. Bonferroni is conservative: settings without a clear result are a tie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ...core.student import t_quantile

LEVEL = 0.05
TOLERANCE = 0.02  # share of the best mean by which settings may differ and still be called equal

Verdict = Literal["best", "equal", "tie", "less"]


@dataclass(frozen=True, slots=True)
class Difference:
    """How much more the leader carries than a setting, in requests/s, over the seeds that both ran.

    Attributes:
        mean: The mean over the seeds.
        half: Half the width of its confidence interval; None for a single seed.
        seeds: How many seeds.
    """

    mean: float
    half: float | None
    seeds: int

    @classmethod
    def of(cls, leader: Sequence[float], other: Sequence[float], level: float) -> Difference:
        """Compute the difference of rates that are paired by seed; a longer sequence is truncated."""
        differences = [a - b for a, b in zip(leader, other, strict=False)]
        half = half_width(differences, level) if len(differences) > 1 else None
        return cls(math.fsum(differences) / len(differences), half, len(differences))


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of settings after their last seed.

    Attributes:
        rates: Capacities of each setting, one for each seed that it ran.
        leader: The setting with the highest mean.
        differences: The difference of each setting from the leader.
        verdicts: For each setting: `best` is the leader; `less` carries less than the leader; `equal` carries the same
            to within the tolerance; `tie` is inconclusive.
    """

    rates: list[list[float]]
    leader: int
    differences: list[Difference]
    verdicts: list[Verdict]

    def order(self, simplicity: Callable[[int], object]) -> list[int]:
        """Return the settings in order of preference.

        Settings not shown to be worse, with means within the tolerance of the leader's, come first, the simplest ahead.
        All others follow by their difference from the leader, those that carry less last.

        Args:
            simplicity: Returns the sort key of a setting, least for the simplest.
        """
        near = TOLERANCE * _mean(self.rates[self.leader])

        def place(number: int) -> tuple[bool, bool, object, float]:
            apart, mean = self.verdicts[number] == "less", self.differences[number].mean
            alike = not apart and mean <= near
            return apart, not alike, simplicity(number) if alike else 0, mean

        return sorted(range(len(self.rates)), key=place)


def compare(
    capacity: Callable[[int, int], float], settings: int, *, least: int, most: int, resolution: float = 0.0
) -> Comparison:
    """Run settings on seeds until each has a verdict other than `tie`, or all seeds are used.

    Settings whose verdict is not `less` end with as many seeds as the leader.

    Args:
        capacity: Returns the capacity of a setting on a seed, both numbered from 0, in requests/s.
        settings: How many settings there are.
        least: Seeds that every setting runs.
        most: Seeds that a setting runs at most.
        resolution: Relative precision of a capacity. Smaller differences of means are ignored.
    """
    assert settings >= 1
    assert 1 <= least <= most
    level = LEVEL / (max(1, settings - 1) * (most - min(most, max(2, least)) + 1))
    rates = [[capacity(number, seed) for seed in range(least)] for number in range(settings)]
    tolerance = max(TOLERANCE, resolution)
    running = set(range(settings))
    for seed in range(least, most + 1):
        leader = max(sorted(running), key=lambda number: _mean(rates[number]))
        judged = {
            number: _judge(
                Difference.of(rates[leader], rates[number], level), _mean(rates[leader]), tolerance, resolution
            )
            for number in running - {leader}
        }
        running = {leader, *(number for number, verdict in judged.items() if verdict == "tie")}
        if len(running) == 1 or seed == most:
            break
        for number in sorted(running):
            rates[number].append(capacity(number, seed))
    differences = [Difference.of(rates[leader], own, level) for own in rates]
    best = _mean(rates[leader])
    alike = [n for n, each in enumerate(differences) if _judge(each, best, tolerance, resolution) != "less"]
    for number in alike:
        rates[number] += [capacity(number, seed) for seed in range(len(rates[number]), len(rates[leader]))]
    leader = max(alike, key=lambda number: _mean(rates[number]))
    differences = [Difference.of(rates[leader], own, level) for own in rates]
    verdicts: list[Verdict] = [
        "best" if number == leader else _judge(difference, _mean(rates[leader]), tolerance, resolution)
        for number, difference in enumerate(differences)
    ]
    return Comparison(rates, leader, differences, verdicts)


def _judge(difference: Difference, best: float, tolerance: float, resolution: float) -> Verdict:
    """Return the verdict on a setting against the leader, whose mean is `best`."""
    mean, half = difference.mean, difference.half
    if half is None:
        return "tie"
    if mean - half > 0.0 and mean > resolution * best:
        return "less"
    return "equal" if abs(mean) + half <= tolerance * best else "tie"


def half_width(values: Sequence[float], level: float) -> float:
    """Return half the width of the confidence interval of the mean of two or more values, by Student's t.

    Args:
        values: The values.
        level: 1 minus the confidence level: 0.05 for a 95% interval.
    """
    number = len(values)
    assert number > 1
    mean = math.fsum(values) / number
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (number - 1))
    return t_quantile(level, number - 1) * deviation / math.sqrt(number)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
