"""The range of a capacity within the cost model's error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ....conf.tuning import TailSlo
from ..cost.error import CostError
from ..pipeline.setting import Setting
from .bounds import Bounds, TokenSeconds
from .capacity import Capacity, ConfidenceInterval, make_bracket
from .demand import Demand
from .trial import Trial, try_rate

_PRECISION = 0.02  # the two capacities are found to within this share, or the search's own if that is coarser
_NEGLIGIBLE = 1 / 64  # of the capacity: lower rates are not tried


@dataclass(frozen=True, slots=True)
class ErrorRange:
    """The capacities with the longest and the shortest stage times within the error, in requests/s."""

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

    Both are found on the first seed, starting at its capacity divided by the scale of the times, and then scaled to the
    mean of all seeds. The SLO is unchanged.

    Args:
        setting: The setting.
        demand: The requests of the first seed.
        slo: Bounds of the tail latencies.
        capacities: Its capacity on each seed.
        precision: The search's precision.
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
    """Return one line that explains a range; empty if the error is not known."""
    if error is None:
        return ""
    return (
        f'"If times are off": the capacity within the same SLO if all stage times were {_longer(error.high)} than '
        f"predicted, and if they were {_longer(error.low)}. ± is the sampling error of the workload."
    )


def _longer(share: float) -> str:
    return f"{share:.0%} longer" if share >= 0 else f"{-share:.0%} shorter"


def range_text(off: ErrorRange | None) -> str:
    """Write a range in requests/s: `1.9 to 2.5`; `-` if there is none."""
    return "-" if off is None else f"{rate_text(off.low)} to {rate_text(off.high)}"


def rate_text(rate: float) -> str:
    """Write a rate with three significant digits."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
