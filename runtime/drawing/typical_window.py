"""Finds the window of a run that is typical of it: stages idle there for the same causes and as long as in the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..core.micro_batch_columns import Floats, values_at
from ..ledger.causes import CAUSES
from ..ledger.ledger import Ledger

LENGTHS = (1.0, 1.5, 2.0, 3.0, 4.0)  # of a window, as multiples of the length asked for
NEAR = 0.05  # a window this near to its run needs no more length
SLACK = 0.01  # of windows this near to the nearest one, that is taken whose compute is nearest too
_MOST_STARTS = 20_000
_SAME = 3  # decimals by which distances differ: of windows alike, the one in the middle of the run is taken


@dataclass(frozen=True, slots=True)
class TypicalWindow:
    """A window of a run, in seconds from the run's start.

    `distance` is the part of its stage time that would have to idle for another cause, or compute, or compute no more,
    for the window to have the run's shares of idle causes: 0 is the same mix, 1 has nothing in common.
    """

    start: float
    end: float
    distance: float

    @property
    def ends(self) -> tuple[float, float]:
        """Its start and end."""
        return self.start, self.end


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

    def distances(self, starts: Floats, seconds: float) -> tuple[Floats, Floats]:
        """How far these windows are from the run by idle causes (`TypicalWindow.distance`), and by all shares."""
        apart = self.within(starts, seconds) - self.run
        idle = apart[:, : len(CAUSES)]
        by_cause: Floats = (np.abs(idle).sum(axis=1) + np.abs(idle.sum(axis=1))) / 2
        by_all: Floats = np.abs(apart).sum(axis=1) / 2
        return by_cause, by_all

    def typical(self, seconds: float) -> TypicalWindow:
        """Find the window of `seconds` that is nearest to the run; all of a run that is no longer than that."""
        if seconds >= self.seconds:
            return TypicalWindow(0.0, max(self.seconds, 1e-6), 0.0)
        last = self.seconds - seconds
        starts = np.append(self.begins[self.begins < last].clip(min=0.0), last)
        starts = starts[:: -(-len(starts) // _MOST_STARTS)]
        by_cause, by_all = self.distances(starts, seconds)
        from_middle = np.abs(starts - last / 2)
        is_near = by_cause <= by_cause.min() + SLACK
        best = np.lexsort((from_middle, by_all.round(_SAME), ~is_near))[0]
        return TypicalWindow(float(starts[best]), float(starts[best]) + seconds, float(by_cause[best]))


def _seconds_until(start: Floats, end: Floats) -> tuple[Floats, Floats]:
    """Return the edges of these intervals, in order, and how many seconds of them have passed at each."""
    until = np.cumsum(end - start)
    return np.stack([start, end], axis=1).ravel(), np.stack([until - (end - start), until], axis=1).ravel()


def typical_windows(runs: Sequence[TimeShares], seconds: float) -> list[TypicalWindow]:
    """Find the typical window of each run, all of one length.

    That is `seconds`, or up to four times as long where the windows of that length are unlike their runs. Of lengths
    that are alike, it is the shortest: a record that was read back, whose times are rounded, has the same windows.
    """
    found: list[list[TypicalWindow]] = []
    for length in LENGTHS:
        found.append([run.typical(seconds * length) for run in runs])
        if max(window.distance for window in found[-1]) <= NEAR:
            return found[-1]
    return min(found, key=lambda windows: round(max(window.distance for window in windows), _SAME))
