"""How far the clocks of a pipeline's ranks lie apart, bounded by what must have come before what.

A receive cannot end before its send began, and no rank leaves a collective that another has not entered. Each such
pair bounds the difference of two clocks from one side; messages back bound it from the other. Over ranks that send
each other nothing the bounds add: all of them together are shortest paths in a graph whose edges are the bounds.
Clocks are taken not to drift: a trace lasts for seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..core.micro_batch_columns import Floats

_ROUNDING = 1e-6  # seconds: traces round times to microseconds
_RELAXED_UNTIL = 1e-9  # seconds to which a contradiction is found


@dataclass(frozen=True, slots=True)
class Order:
    """Events of rank `first` that came before events of rank `second`, an entry each.

    Attributes:
        before: times of the earlier events, in seconds on the clock of `first`.
        after: times of the later ones, in seconds on the clock of `second`.
        least: seconds that lie between them at least: of a transfer, its bytes over the fastest link.
    """

    first: int
    second: int
    before: Floats
    after: Floats
    least: float | Floats = 0.0

    @property
    def room(self) -> Floats:
        """Seconds by which the clock of `second` is ahead of that of `first` at most, by each pair of events."""
        return self.after - self.before - self.least


@dataclass(frozen=True, slots=True)
class ClockFit:
    """Where a rank's clock lies beside the reference rank's, and how well the trace says so.

    Attributes:
        ahead: seconds by which the rank's clock is ahead of the reference's.
        low: the least that it may be; -infinity where nothing bounds it from below.
        high: the most; infinity where nothing bounds it from above.
        same_clock: both read one clock.
        pairs: pairs of events that bound it.
        by_other_ranks: ways over other ranks bound it closer than events between the two.
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
        """How far `ahead` may be off, in seconds; None where nothing bounds it from one side."""
        if math.isinf(self.low) or math.isinf(self.high):
            return None
        return max(self.high - self.ahead, self.ahead - self.low, 0.0)

    @property
    def text(self) -> str:
        """A sentence for people."""
        clocks, theirs = f"clocks of rank {self.rank}", f"rank {self.reference}'s"
        messages = f"{self.pairs:,} {'message' if self.pairs == 1 else 'messages'}"
        if self.same_clock:
            return f"ranks {self.reference} and {self.rank} read one clock: their offset is 0"
        if not self.pairs:
            return f"{clocks}: no message bounds their offset from {theirs}; times are as recorded"
        if self.contradiction > 0:
            return (
                f"{clocks}: no offset from {theirs} fits all {messages}; {_lie(self.ahead)} {theirs}, "
                f"{_shown(self.contradiction / 2)} are left unexplained at most"
            )
        if self.half_width is None:
            bound, is_upper = (self.high, True) if math.isinf(self.low) else (self.low, False)
            most = "at most" if is_upper == (bound > 0) else "at least"
            return (
                f"{clocks} lie {most} {_lie(bound)} {theirs}, bounded from one side only, by {messages}; taken as just "
                "that, as if the fastest took no time"
            )
        ways = "over other ranks" if self.by_other_ranks else "both ways"
        return f"{clocks} lie {_lie(self.ahead, self.half_width)} {theirs}, from {messages} {ways}"


def _lie(ahead: float, half_width: float | None = None) -> str:
    off = "" if half_width is None else f" ± {_shown(half_width)}"
    return f"{_shown(abs(ahead))}{off} {'ahead of' if ahead > 0 else 'behind'}"


def _shown(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 10 else f"{seconds * 1e3:.3f} ms"


def fit_clocks(clocks: Mapping[int, str], orders: Iterable[Order]) -> dict[int, ClockFit]:
    """Return where the clock of each rank lies beside that of the first rank, the reference.

    Args:
        clocks: by rank, the name of its clock; ranks that name the same one read it together, and "" is a clock of
            the rank's own.
        orders: what came before what.
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
    """Return how far each clock may be ahead of each other one, by way of all: shortest paths (Floyd and Warshall)."""
    most = room.copy()
    for via in range(len(most)):
        most = np.minimum(most, most[:, via, None] + most[None, via])
    return most


def _least_relaxation(room: Floats) -> float:
    """Return the least seconds by which every bound must give way, so that some offsets fit all of them."""

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
    """Return the offsets that fit all bounds: the middle between two, and the bound itself where there is one alone.

    The middles fit each other: a bound between two clocks is no more than the ways over clock 0. The others are set
    one after the other, each within the bounds that those set before leave it. A bound alone is close where it
    matters: a stage that waits stands before its message comes, and then nothing but the transfer lies between.
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
