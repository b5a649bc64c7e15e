"""What the cost model's error makes of a capacity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...conf.tuning import TailSlo
from ..cost.error import CostError
from ..simulation.setting import Setting
from .bounds import Bounds, TokenSeconds
from .capacity import Capacity, ConfidenceInterval, make_bracket
from .demand import Demand
from .trial import Trial, try_rate

_PRECISION = 0.02  # the two capacities are found to within this share, or the search's own if that is coarser
_NEGLIGIBLE = 1 / 64  # of the capacity: lower rates are not tried


@dataclass(frozen=True, slots=True)
class ErrorRange:
    """The capacity where stage times are as long as the error allows, and where they are as short; in requests/s."""

    low: float
    high: float


def error_range(
    setting: Setting,
    demand: Demand,
    slo: TailSlo,
    capacities: Sequence[Capacity],
    precision: float,
    *,
    token_times: TokenSeconds | None = None,
    on_trial: Callable[[Trial], None] = lambda trial: None,
) -> ErrorRange | None:
    """Find the capacity of a setting again with stage times at both ends of the cost model's error.

    Both are found on the first seed, beginning where the capacity would be if it followed the times alone, and carried
    over to the mean of all seeds by their ratio. The SLO stays as it is.

    Args:
        setting: The setting.
        demand: The requests of the first seed.
        slo: Bounds of the tail latencies.
        capacities: Its capacity on each seed.
        precision: That of the search.
        token_times: Times that all `Bounds` share.
        on_trial: Called with each trial.

    Returns:
        The range; None if the error is not known or the setting carries nothing on the first seed.
    """
    error, rate = setting.error, capacities[0].rate
    if error is None or rate == 0.0:
        return None
    bounds = Bounds(demand, slo, token_times)

    def capacity(scale: float) -> float:
        scaled = setting.with_times(scale)
        bound = bounds(scaled).rate
        if bound == 0.0:
            return 0.0

        def attempt(rate: float) -> Trial:
            trial = try_rate(scaled, demand, rate, slo)
            on_trial(trial)
            return trial

        bracket = make_bracket(attempt, bound, demand, _NEGLIGIBLE * rate)
        share = max(precision, _PRECISION)
        bracket.climb(min(rate / scale, 0.99 * bound), 1 + 4 * share)
        bracket.narrow(share)
        return bracket.low

    mean = ConfidenceInterval.from_rates([each.rate for each in capacities]).mean
    return ErrorRange(*(mean / rate * capacity(1 + share) for share in (error.high, error.low)))


def range_note(error: CostError | None) -> str:
    """Say in one line what a range means; empty if the error is not known."""
    if error is None:
        return ""
    return (
        f'"If times are off": the capacity within the same SLO if all stage times were {_longer(error.high)}, and if '
        f"they were {_longer(error.low)}, than predicted. ± says how much is chance in the workload."
    )


def _longer(share: float) -> str:
    return f"{share:.0%} longer" if share >= 0 else f"{-share:.0%} shorter"
