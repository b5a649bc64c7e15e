"""Clock offsets between a pipeline's ranks, bounded by happened-before relations.

A receive cannot end before its send began, and no rank leaves a collective before every rank has entered it. Each such
pair bounds the offset of two clocks from one side; messages in the other direction bound it from the other side. For
ranks that exchange no messages, bounds add up along paths: the tightest ones are shortest paths in a graph whose edges
are the bounds. Clocks are assumed not to drift, as a trace lasts for seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...core.micro_batch_columns import Floats

_ROUNDING = 1e-6  # seconds: traces round times to microseconds
_RELAXED_UNTIL = 1e-9  # seconds, tolerance of the search for a contradiction


@dataclass(frozen=True, slots=True)
class Order:
    """Events of rank `first` that happened before events of rank `second`, one entry per pair.

    Attributes:
        before: times of the earlier events, in seconds on the clock of `first`.
        after: times of the later ones, in seconds on the clock of `second`.
        least: minimum seconds between them: for a transfer, its bytes over the fastest link's bandwidth.
    """

    first: int
    second: int
    before: Floats
    after: Floats
    least: float | Floats = 0.0

    @property
    def room(self) -> Floats:
        """Upper bound, from each pair of events, on the seconds by which `second`'s clock is ahead of `first`'s."""
        return self.after - self.before - self.least


@dataclass(frozen=True, slots=True)
class ClockFit:
    """Offset of a rank's clock from the reference rank's, and its uncertainty.

    Attributes:
        ahead: seconds by which the rank's clock is ahead of the reference's.
        low: lower bound of `ahead`; -infinity if unbounded.
        high: upper bound of `ahead`; infinity if unbounded.
        same_clock: both read one clock.
        pairs: pairs of events that bound it.
        by_other_ranks: paths over other ranks give tighter bounds than events between the two.
        contradiction: seconds by which the pairs contradict each other under every offset.
    """

    rank: int
    reference: int
    ahead: float = 0.0
    low: float = -math.inf
    high: float = math.inf
    same_clock: bool = False
    pairs: int = 0
    by_other_ranks: bool = False
    contradiction: float = 0.0

    @property
    def half_width(self) -> float | None:
        """How far `ahead` may be off, in seconds; None if it is unbounded on a side."""
        if math.isinf(self.low) or math.isinf(self.high):
            return None
        return max(self.high - self.ahead, self.ahead - self.low, 0.0)

    @property
    def text(self) -> str:
        """A sentence for the report."""
        clock, theirs = f"the clock of rank {self.rank}", f"rank {self.reference}'s"
        messages = f"{self.pairs:,} {'message' if self.pairs == 1 else 'messages'}"
        if self.same_clock:
            return f"ranks {self.reference} and {self.rank} share a clock: their offset is 0"
        if not self.pairs:
            return f"{clock}: no message bounds its offset from {theirs}; times are as recorded"
        if self.contradiction > 0:
            return (
                f"{clock}: no offset from {theirs} fits all {messages}; {_offset(self.ahead)} {theirs} leaves at most "
                f"{_shown(self.contradiction / 2)} unexplained"
            )
        if self.half_width is None:
            bound, is_upper = (self.high, True) if math.isinf(self.low) else (self.low, False)
            most = "at most" if is_upper == (bound > 0) else "at least"
            return (
                f"{clock} is {most} {_offset(bound)} {theirs}, by {messages} in one direction only; this bound is "
                "used, as if the fastest took no time"
            )
        ways = "over other ranks" if self.by_other_ranks else "in both directions"
        return f"{clock} is {_offset(self.ahead, self.half_width)} {theirs}, by {messages} {ways}"


def _offset(ahead: float, half_width: float | None = None) -> str:
    off = "" if half_width is None else f" ± {_shown(half_width)}"
    return f"{_shown(abs(ahead))}{off} {'ahead of' if ahead > 0 else 'behind'}"


def _shown(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 10 else f"{seconds * 1e3:.3f} ms"


def fit_clocks(clocks: Mapping[int, str], orders: Iterable[Order]) -> dict[int, ClockFit]:
    """Return each rank's clock offset from the first rank, the reference.

    Args:
        clocks: name of each rank's clock; ranks with the same name share a clock, and "" is a clock of the rank's own.
        orders: the happened-before relations.
    """
    names = {rank: name or f"of rank {rank} alone" for rank, name in clocks.items()}
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names.values()))}
    clock = {rank: numbers[name] for rank, name in names.items()}
    between = [replace(order, first=clock[order.first], second=clock[order.second]) for order in orders]
    fits = _fit(len(numbers), [order for order in between if order.first != order.second and len(order.before)])
    reference = next(iter(clocks), 0)
    of_rank = {}
    for rank in clocks:
        same_clock = clock[rank] == 0 and rank != reference
        of_rank[rank] = replace(fits[clock[rank]], rank=rank, reference=reference, same_clock=same_clock)
    return of_rank


def _fit(num_clocks: int, orders: Sequence[Order]) -> list[ClockFit]:
    """Return the fit of each clock to clock 0; `orders` are between clocks."""
    room = np.full((num_clocks, num_clocks), np.inf)
    np.fill_diagonal(room, 0.0)
    for order in orders:
        room[order.first, order.second] = min(room[order.first, order.second], float(order.room.min()))
    relaxed = _least_relaxation(room)
    room += relaxed
    most = _closed(room)
    is_direct = (room[0] <= most[0]) & (room[:, 0] <= most[:, 0])
    contradiction = 2 * relaxed if relaxed > _ROUNDING else 0.0
    fits = []
    for clock, ahead in enumerate(_chosen(most).tolist()):
        ends = {0, clock} if is_direct[clock] else {clock}
        pairs = sum(len(o.before) for o in orders if ends <= {o.first, o.second})
        low, high = -float(most[clock, 0]), float(most[0, clock])
        fits.append(ClockFit(clock, 0, ahead, low, high, False, pairs, not is_direct[clock], contradiction))
    return fits


def _closed(room: Floats) -> Floats:
    """Bound pairwise clock offsets by all-pairs shortest paths (Floyd-Warshall)."""
    most = room.copy()
    for via in range(len(most)):
        most = np.minimum(most, most[:, via, None] + most[None, via])
    return most


def _least_relaxation(room: Floats) -> float:
    """Return the minimum seconds by which all bounds must be relaxed so that some offsets satisfy them."""

    def fits(relaxed: float) -> bool:
        return bool((np.diag(_closed(room + relaxed)) >= -_RELAXED_UNTIL).all())

    for tried in (0.0, _ROUNDING):
        if fits(tried):
            return tried
    low, high = _ROUNDING, max(-float(room.min()), 2 * _ROUNDING)
    while high - low > _RELAXED_UNTIL + 1e-6 * low:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _chosen(most: Floats) -> Floats:
    """Return offsets that satisfy all bounds: the midpoint of two bounds, or the bound itself if there is only one.

    The midpoints are consistent: a bound between two clocks is at most the path over clock 0. The other clocks are set
    one at a time, within the bounds given by those already set. A single bound is tight when it matters: a waiting
    stage is ready before its message arrives, so only the transfer is in between.
    """
    ahead = np.zeros(len(most))
    both = np.isfinite(most[0]) & np.isfinite(most[:, 0])
    ahead[both] = (most[0, both] - most[both, 0]) / 2
    chosen = np.flatnonzero(both).tolist()
    for clock in np.flatnonzero(~both).tolist():
        low = max(float(ahead[other] - most[clock, other]) for other in chosen)
        high = min(float(ahead[other] + most[other, clock]) for other in chosen)
        bounds = [bound for bound in (low, high) if math.isfinite(bound)]
        ahead[clock] = sum(bounds) / max(1, len(bounds))
        chosen.append(clock)
    return ahead
