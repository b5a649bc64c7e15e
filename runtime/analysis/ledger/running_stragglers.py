"""Online straggler detection for unbounded runs: which stage is slow now, in bounded memory and time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from ...core.micro_batch_columns import Floats
from .ledger import Ledger
from .stragglers import (
    LEAST_WAITED,
    SLOWDOWN,
    WAITS,
    Straggler,
    Usual,
    columns_of,
    common_places,
    fit_usual,
    usual_level,
)

_ROW_S = 1.0  # minimum length of a row
_SAMPLED = 16  # micro-batches sampled per row, also the minimum per row
_MOST_ROWS = 512
_FITTED_ROWS = 64  # at most, sampled evenly from all rows
_ROWS_A_FIT = 8
_LEAST_ROWS = 8  # before any stage is judged
_LEAST_SLOW = 2  # consecutive rows


@dataclass(frozen=True, slots=True)
class _Row:
    """A second or more of the run.

    Attributes:
        begin: seconds.
        end: seconds.
        count: micro-batches.
        seconds: sampled compute times, [stages, samples].
        held: tokens and decodes of the sampled micro-batches, [samples, 2].
        waits: seconds per micro-batch that each stage waited for other stages.
    """

    begin: float
    end: float
    count: int
    seconds: Floats
    held: Floats
    waits: Floats


class RunningStragglers:
    """Finds stages that are slower than usual relative to the other stages, as `find_stragglers` does.

    A stage is slow from the second consecutive row that takes `SLOWDOWN` times its usual time, if other stages wait
    for it.

    Attributes:
        current: the stages that are slow now.
        slow_seconds: total time for which each stage has been slow.
    """

    def __init__(self) -> None:
        self.current: list[Straggler] = []
        self.slow_seconds: Floats = np.zeros(0)
        self._rows: deque[_Row] = deque(maxlen=_MOST_ROWS)
        self._slow: list[list[tuple[_Row, float]]] = []  # by stage, the latest consecutive slow rows and their slowdown
        self._parts: list[tuple[Floats, Floats, float, float]] = []  # of the next row: seconds, held, begin, end
        self._num_stages = 0  # that compute
        self._usual: list[tuple[Usual, float]] = []  # by stage: the fit, and the usual ratio of its times to the fit
        self._usual_waits: Floats = np.zeros(0)
        self._until_fit = 0  # rows
        self._waited: Floats = np.zeros(0)  # seconds by stage before the next row

    def add(self, ledger: Ledger, first: int, idle: Floats) -> None:
        """Add an increment that a `RunningLedger` has counted.

        Args:
            ledger: the increment's ledger.
            first: index of its first new micro-batch.
            idle: seconds until now, [stages, causes].
        """
        waited = idle[:, WAITS].sum(axis=1)
        if len(waited) != len(self.slow_seconds):
            self.slow_seconds = np.zeros(len(waited))
            self._slow = [[] for _ in waited]
            self._waited = waited
        number = ledger.micro_batches.micro_batch[first]
        lanes = [lane for lane in ledger.lanes if len(lane.row) and lane.micro_batch[-1] >= number]
        if len(lanes) < 2:
            return
        if len(lanes) != self._num_stages:  # the pipeline has changed
            self._num_stages = len(lanes)
            self._rows.clear()
            self._parts.clear()
            self._until_fit = 0
            self.current = []
            for slow in self._slow:
                slow.clear()
        common = common_places(lanes)
        is_new = lanes[0].micro_batch[common[0]] >= number
        places = [place[is_new] for place in common]
        if not len(places[0]):
            return
        begin, end = lanes[0].begin[places[0][0]], lanes[-1].end[places[-1][-1]]
        self._parts.append((*columns_of(ledger, lanes, places), float(begin), float(end)))
        if sum(len(part[1]) for part in self._parts) >= _SAMPLED and end - self._parts[0][2] >= _ROW_S:
            self._end_row(waited)

    def _end_row(self, waited: Floats) -> None:
        parts, self._parts = self._parts, []
        seconds = np.concatenate([part[0] for part in parts], axis=1)
        held = np.concatenate([part[1] for part in parts])
        sample = np.linspace(0, len(held) - 1, _SAMPLED).astype(np.int64)
        waits = (waited - self._waited)[: len(seconds)] / len(held)
        self._waited = waited
        row = _Row(parts[0][2], parts[-1][3], len(held), seconds[:, sample], held[sample], waits)
        if len(self._rows) >= _LEAST_ROWS:
            if self._until_fit <= 0:
                self._fit()
                self._until_fit = _ROWS_A_FIT
            self._judge(row)
        self._until_fit -= 1
        self._rows.append(row)

    def _fit(self) -> None:
        """Fit each stage's usual times to the rows so far."""
        rows = list(self._rows)[:: -(-len(self._rows) // _FITTED_ROWS)]
        seconds = np.concatenate([each.seconds for each in rows], axis=1)
        held = np.concatenate([each.held for each in rows])
        self._usual_waits = np.median([each.waits for each in rows], axis=0)
        self._usual = []
        for stage, own in enumerate(seconds):
            usual = fit_usual(stage, seconds, held)
            by_row = np.median((own / usual.of(stage, seconds, held)).reshape(len(rows), _SAMPLED), axis=1)
            self._usual.append((usual, usual_level(by_row)))

    def _judge(self, row: _Row) -> None:
        """Update `current` and `slow_seconds` with a new row."""
        self.current = []
        for stage, (slow, (usual, level)) in enumerate(zip(self._slow, self._usual, strict=False)):
            times = float(np.median(row.seconds[stage] / usual.of(stage, row.seconds, row.held))) / level
            if times < SLOWDOWN:
                slow.clear()
                continue
            slow.append((row, times))
            if len(slow) < _LEAST_SLOW:
                continue
            if len(slow) > _MOST_ROWS:
                del slow[0]
            begin, end = slow[0][0].begin, row.end
            extra = sum(((each.waits - self._usual_waits) * each.count for each, _ in slow), np.zeros(len(row.waits)))
            extra_of_others = max(0.0, float(np.delete(extra, stage).sum()))
            if extra_of_others >= LEAST_WAITED * (end - begin):
                self.slow_seconds[stage] += end - (begin if len(slow) == _LEAST_SLOW else slow[-2][0].end)
                slowdown = float(np.median([each for _, each in slow]))
                self.current.append(Straggler(stage, begin, end, slowdown, extra_of_others))
