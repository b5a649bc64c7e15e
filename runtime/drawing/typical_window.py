"""Finds the window of a run that is typical of it: stage time goes there to what it goes to in the whole run."""

from __future__ import annotations

import numpy as np

from ..core.micro_batch_columns import Floats, values_at
from ..ledger.causes import CAUSES
from ..ledger.ledger import Ledger

_MOST_STARTS = 20_000
_SAME = 3  # decimals by which distances differ: of windows alike, the one in the middle of the run is taken


class TimeShares:
    """What stage time goes to, in a run and in any window of it.

    Shares are in the order of `CAUSES`, then compute of micro-batches with chunks, then compute of those without. They
    sum to 1.

    Attributes:
        seconds: length of the run.
        run: the shares of the whole run.
        begins: when micro-batches begin on the first stage, in seconds from the run's start; windows begin there.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.seconds = ledger.span_seconds
        self.begins: Floats = ledger.lanes[0].begin - ledger.t0 if ledger.lanes else np.zeros(0)
        self._num_stages = max(1, ledger.num_stages)
        self._curves: list[list[tuple[Floats, Floats]]] = []  # of each share but the last, for each stage
        for code in range(len(CAUSES)):
            own = [(idle.start[idle.cause == code], idle.end[idle.cause == code]) for idle in ledger.idle_columns]
            curves = [_seconds_until(start - ledger.t0, end - ledger.t0) for start, end in own if len(start)]
            self._curves.append(curves)
        self._curves.append([])
        columns = ledger.micro_batches
        for lane in ledger.lanes:
            has_chunks = values_at(columns.prefill, columns.places(lane.micro_batch)) > 0
            if has_chunks.any():
                begin, end = lane.begin[has_chunks] - ledger.t0, lane.end[has_chunks] - ledger.t0
                self._curves[-1].append(_seconds_until(begin, end))
        self.run: Floats = self.within(np.zeros(1), max(self.seconds, 1e-9))[0]

    def within(self, starts: Floats, seconds: float) -> Floats:
        """Return the shares of the windows of `seconds` from these starts, [windows, shares]."""
        shares = np.zeros((len(starts), len(self._curves) + 1))
        for place, curves in enumerate(self._curves):
            for times, until in curves:
                shares[:, place] += np.interp(starts + seconds, times, until) - np.interp(starts, times, until)
        shares /= seconds * self._num_stages
        shares[:, -1] = 1.0 - shares.sum(axis=1)
        return shares

    def idle(self, start: float, end: float) -> float:
        """Return the share of a window in which stages idle."""
        return float(self.within(np.array([start]), end - start)[0, : len(CAUSES)].sum())

    def distances(self, starts: Floats, seconds: float) -> Floats:
        """Return how far the windows of `seconds` from these starts are from the run.

        That is the part of their stage time that would have to go elsewhere for the run's shares: 0 is the same mix, 1
        has nothing in common.
        """
        distances: Floats = np.abs(self.within(starts, seconds) - self.run).sum(axis=1) / 2
        return distances

    def typical(self, seconds: float) -> tuple[float, float]:
        """Return start and end of the window of `seconds` that is nearest to the run; all of a run no longer than that.

        They are seconds from the run's start.
        """
        last = self.seconds - seconds
        if last <= 0:
            return 0.0, max(self.seconds, 1e-6)
        starts = np.append(self.begins[self.begins < last].clip(min=0.0), last)
        starts = starts[:: -(-len(starts) // _MOST_STARTS)]
        from_middle = np.abs(starts - last / 2)
        start = float(starts[np.lexsort((from_middle, self.distances(starts, seconds).round(_SAME)))[0]])
        return start, start + seconds


def _seconds_until(start: Floats, end: Floats) -> tuple[Floats, Floats]:
    """Return the edges of these intervals, in order, and how many seconds of them have passed at each."""
    until = np.cumsum(end - start)
    return np.stack([start, end], axis=1).ravel(), np.stack([until - (end - start), until], axis=1).ravel()
