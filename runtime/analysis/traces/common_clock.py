"""Aligns the clocks of a pipeline's rank traces, as far as their messages bound the clock offsets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from .clock_skew import Order, fit_clocks
from .matching import match_transfers, shift_between
from .rank_trace import RankTrace, Transfer, with_times
from .stage_spans import stage_spans

_FASTEST_LINK = 0.9e12  # bytes/s: NVLink 5, one way (NVIDIA GB200 NVL72's data sheet, 1.8 TB/s both ways)
_ONE_CLOCK = 1e-3  # seconds by which two processes' readings of one clock may differ
_ROUNDING = 1e-5  # seconds of rounding error in traces
_UNNAMED = "unnamed"  # placeholder host of traces without a host name


def align_clocks(lanes: Sequence[RankTrace]) -> list[str]:
    """Shift the times of the ranks, one per stage in order, to the first one's clock; return notes for the report."""
    orders = _orders(lanes)
    fits = fit_clocks(_clocks(lanes, orders), orders)
    for trace in lanes:
        _move(trace, fits[trace.rank].ahead)
    others = [fits[trace.rank] for trace in lanes[1:]]
    if others and all(fit.same_clock for fit in others):
        every = "Both" if len(lanes) == 2 else f"All {len(lanes)}"
        if all(trace.host for trace in lanes):
            return [f"{every} ranks share a clock: their offset is 0."]
        return [f"{every} ranks are assumed to share a clock: the traces name no host, and no message contradicts it."]
    return [f"{fit.text[0].upper()}{fit.text[1:]}." for fit in others]


def _clocks(lanes: Sequence[RankTrace], orders: Sequence[Order]) -> dict[int, str]:
    """Return the name of each rank's clock: its host, unless messages between ranks of that host contradict it.

    Ranks whose traces have no host name are assumed to share a host.
    """
    host = {trace.rank: trace.host or _UNNAMED for trace in lanes}
    wrong = {
        host[order.first]
        for order in orders
        if host[order.first] == host[order.second]
        and float(order.room.min()) < -(_ROUNDING if host[order.first] == _UNNAMED else _ONE_CLOCK)
    }
    return {rank: "" if name in wrong else name for rank, name in host.items()}


def _orders(lanes: Sequence[RankTrace]) -> list[Order]:
    orders = []
    spans = [stage_spans(trace) for trace in lanes]
    for stage in range(1, len(lanes)):
        shift = shift_between(spans[stage - 1], spans[stage])
        matched = [
            (pair.send, pair.receive)
            for i, span in enumerate(spans[stage - 1])
            if 0 <= i + shift < len(spans[stage])
            for pair in match_transfers(span, spans[stage][i + shift])
        ]
        orders += _order(lanes[stage - 1].rank, lanes[stage].rank, matched)
    for sender in lanes:
        for receiver in lanes:
            neighbours = lanes.index(receiver) - lanes.index(sender) == 1
            if sender is not receiver and not neighbours:
                orders += _order(sender.rank, receiver.rank, list(_by_peer(sender, receiver)))
    return orders


def _by_peer(sender: RankTrace, receiver: RankTrace) -> Iterator[tuple[Transfer, Transfer]]:
    """Yield the transfers between two ranks that name each other as peers, matched in order.

    If the counts differ, the last sends are assumed to have no receive, or the first receives no send. Of all
    matchings this gives the loosest bounds, since it takes the earliest sends and the latest receives.
    """
    sent = [send for send in sender.sends if send.peer == receiver.rank]
    got = [each for each in receiver.receives if each.peer == sender.rank]
    for group in dict.fromkeys(send.group for send in sent):
        out = [send for send in sent if send.group == group]
        back = [receive for receive in got if receive.group == group]
        count = min(len(out), len(back))
        out, back = out[:count], back[len(back) - count :]
        if [send.bytes for send in out] == [receive.bytes for receive in back]:
            yield from zip(out, back, strict=True)


def _order(first: int, second: int, matched: Sequence[tuple[Transfer, Transfer]]) -> list[Order]:
    if not matched:
        return []
    before = np.array([send.start for send, _ in matched])
    after = np.array([receive.end for _, receive in matched])
    least = np.array([(send.bytes or 0) / _FASTEST_LINK for send, _ in matched])
    return [Order(first, second, before, after, least)]


def _move(trace: RankTrace, ahead: float) -> None:
    """Shift the times of a rank whose clock is `ahead` seconds ahead to the reference clock."""

    def moved(time: float) -> float:
        return time - ahead

    trace.computes = trace.computes - ahead
    trace.steps = with_times(trace.steps, moved)
    trace.sends, trace.receives = with_times(trace.sends, moved), with_times(trace.receives, moved)
