"""How close settings come to an SLO that none of them meets, at the lowest rate that a search tries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....conf.tuning import TailSlo
from ...core.numbers import ms_text
from ..pipeline.setting import Setting
from .bounds import Bounds
from .capacity import LOWEST_SHARE
from .demand import Demand
from .trial import Trial, try_rate

_SHORTLIST = 6  # settings that are simulated, ranked by the excess of their shortest possible tails
_SHOWN = 3  # settings that are returned
_REQUESTS = 100  # of the workload's requests, in the first simulation


@dataclass(frozen=True, slots=True)
class SloMargin:
    """A tail latency and its bound, in milliseconds.

    Attributes:
        name: The latency: TTFT or TBT.
        key: The key of its bound.
        p99_ms: The p99 that was reached.
        bound_ms: The bound.
    """

    name: str
    key: str
    p99_ms: float
    bound_ms: float

    @property
    def times(self) -> float:
        """The latency as a multiple of its bound."""
        return self.p99_ms / self.bound_ms

    @property
    def text(self) -> str:
        """The latency as text, with how far it is over its bound."""
        bound = f"{self.key}={self.bound_ms:.10g}"
        reached = f"{self.name} p99 {ms_text(self.p99_ms)}"
        if self.times <= 1.0:
            return f"{reached}, within {bound}"
        return f"{reached}, {ms_text(self.p99_ms - self.bound_ms)} over {bound} ({self.times:.3g}x)"


@dataclass(frozen=True, slots=True)
class Approach:
    """How close a setting comes to the SLO.

    Attributes:
        label: The setting.
        trial: Its run at the lowest rate that a search tries.
        tails: Its tail latencies that have a bound.
    """

    label: str
    trial: Trial
    tails: tuple[SloMargin, ...]

    @property
    def times(self) -> float:
        """The worst tail, as a multiple of its bound."""
        return max(tail.times for tail in self.tails)

    @property
    def text(self) -> str:
        """The setting as text, with its tails and their bounds, the worst first."""
        tails = sorted(self.tails, key=lambda tail: -tail.times)
        reasons = "; ".join(tail.text for tail in tails)
        if self.times <= 1.0 and self.trial.why:
            reasons += f"; {self.trial.why}"
        return f"{self.label} at {self.trial.rate:.2g} requests/s: {reasons}"

    def numbers(self) -> dict[str, Any]:
        """Return the approach for a JSON file."""
        return {
            "setting": self.label,
            "rate": self.trial.rate,
            "tails": {
                tail.key: {
                    "p99_ms": tail.p99_ms,
                    "bound_ms": tail.bound_ms,
                    "over_ms": tail.p99_ms - tail.bound_ms,
                    "times": tail.times,
                }
                for tail in self.tails
            },
        }


def closest(
    settings: Mapping[str, Setting],
    demand: Demand,
    slo: TailSlo,
    bounds: Bounds,
    on_trial: Callable[[Trial], None] = lambda trial: None,
) -> list[Approach]:
    """Return the settings that come closest to the SLO, the closest first.

    All run at the lowest rate that a search would try for any of them: requests hardly overlap, so tails are close to
    their minimum.

    Args:
        settings: Settings that meet the SLO at no rate, by their labels.
        demand: The requests.
        slo: Bounds of the tail latencies.
        bounds: Of the same requests.
        on_trial: Called with each trial.
    """

    def floor(label: str) -> float:
        ttft_ms, tbt_ms = bounds.floors_ms(settings[label])
        return max(tail.times for tail in _tails(ttft_ms, tbt_ms, slo))

    shortlist = sorted(settings, key=floor)[:_SHORTLIST]
    rate = LOWEST_SHARE * min(bounds.throughput(settings[label]) for label in shortlist)
    found = []
    for label in shortlist:
        for requests in (demand.sample(_REQUESTS), demand):
            trial = try_rate(settings[label], requests, rate, slo, to_end=True)
            on_trial(trial)
            if not trial.carried:  # if carried, the sample is too small to tell
                break
        assert trial.ttft_p99_ms is not None
        assert trial.tbt_p99_ms is not None
        found.append(Approach(label, trial, _tails(trial.ttft_p99_ms, trial.tbt_p99_ms, slo)))
    return sorted(found, key=lambda approach: approach.times)[:_SHOWN]


def unmet_note(found: Sequence[Approach]) -> str:
    """Return one line: no setting meets the SLO, which one comes closest, and by how much it misses each bound."""
    near = f"; closest: {found[0].text}" if found else ""
    return f"no setting meets the SLO at any rate{near}"


def _tails(ttft_ms: float, tbt_ms: float, slo: TailSlo) -> tuple[SloMargin, ...]:
    """Return the tails that have a bound."""
    named = (("TTFT", "slo.ttft_p99_ms", ttft_ms, slo.ttft_p99_ms), ("TBT", "slo.tbt_p99_ms", tbt_ms, slo.tbt_p99_ms))
    return tuple(SloMargin(name, key, tail, bound) for name, key, tail, bound in named if bound is not None)
