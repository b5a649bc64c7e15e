"""Attributes to `contention` the idle time in which a rank's threads were runnable but waited for a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...core.messages import Span
from ...core.micro_batch_columns import Floats
from .causes import Cause
from .idle import IdleColumns
from .lanes import Lane


def name_contention(idle: Sequence[IdleColumns], lanes: Sequence[Lane], spans: Sequence[Span]) -> list[IdleColumns]:
    """Return the idle intervals of each stage, with `contention` cut out of `transport` and `control`.

    Before each micro-batch, `contention` replaces these two causes for as many seconds as the rank's threads waited for
    a CPU. It takes their last seconds, since the threads that receive an activation or a dispatch run at the end.

    Args:
        idle: each stage's idle intervals.
        lanes: each stage's lane.
        spans: the spans with such waits.
    """
    if not spans:
        return list(idle)
    waited = {(span.stage, span.micro_batch): span.contended_before for span in spans}
    return [
        _cut(columns, np.array([waited.get((stage, number), 0.0) for number in lane.micro_batch.tolist()] + [0.0]))
        for stage, (columns, lane) in enumerate(zip(idle, lanes, strict=True))
    ]


def _cut(idle: IdleColumns, waited: Floats) -> IdleColumns:
    """Relabel the last `waited[place]` seconds of both causes before each micro-batch; -1: after the last one."""
    is_one = np.isin(idle.cause, [Cause.TRANSPORT.code, Cause.CONTROL.code])
    seconds = np.where(is_one, idle.seconds, 0.0)
    until = np.cumsum(seconds)
    of_place = np.zeros(len(waited))
    np.maximum.at(of_place, idle.place, until)  # seconds of both causes up to the end of each gap
    named = np.clip(waited[idle.place] - (of_place[idle.place] - until), 0.0, seconds)
    cut = np.where(named >= seconds, np.where(is_one, idle.start, idle.end), idle.end - named)
    return IdleColumns.joined(
        [
            IdleColumns.of(idle.start, cut, idle.cause, idle.place),
            IdleColumns.of(cut, idle.end, Cause.CONTENTION, idle.place),
        ]
    )
