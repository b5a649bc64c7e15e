"""The worst moments of a run: tokens that took long beside what is typical, and stages that stood for long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ..core.micro_batch_columns import Floats, Ints
from .blame import Blame
from .carried import Bools
from .causes import CAUSES, Cause
from .ledger import Ledger
from .token_intervals import Part, StagePart, TokenIntervals, stage_part

Kind = Literal["tbt", "ttft", "stall"]

_SLOW = 2.0  # times what is typical, from which on an interval counts
_SLOW_FIRST = 3.0  # the same of first tokens: of requests that come all at once the last waits twice the median
_MOST_CANDIDATES = 2000
_MOST_BLAMED = 3
_NO_STALL = (Cause.FILL_DRAIN, Cause.STARVED_NO_REQUEST)


@dataclass(frozen=True, slots=True)
class Moment:
    """A time in which tokens were slow or a stage stood. Times are seconds on the coordinator's clock.

    Attributes:
        kind: what its longest interval is.
        start: begin of that interval.
        end: its end.
        typical: seconds of a typical interval of this kind; for a stage that stood, of a typical compute.
        requests: how many requests had a slow interval then.
        cause: the part in which those took longer than all do, such as `compute` or `queue`, summed over stages; for a
            stage that stood, the cause of that.
        stage: where that was the longest, if the cause is a stage's.
        excess: seconds by which that part was longer in the mean.
        blamed: places of requests that cost those most, with the seconds, most first.
    """

    kind: Kind
    start: float
    end: float
    typical: float
    requests: int
    cause: str
    stage: int | None
    excess: float
    blamed: list[tuple[int, float]]

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(slots=True)
class _Found:
    """A candidate, and those that are merged into it, as indices of candidates."""

    place: int
    score: float
    merged: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Slow intervals, an entry each; token intervals that are alike are one.

    `score`: by how many typical lengths it is too long, times the requests. `source`: the row of the table of token
    intervals, a TTFT's index, or the place among the idle intervals of `stage`.
    """

    kind: list[Kind]
    start: Floats
    end: Floats
    score: Floats
    source: Ints
    stage: Ints

    def best(self) -> _Candidates:
        order = np.argsort(-self.score, kind="stable")[:_MOST_CANDIDATES]
        kinds = [self.kind[place] for place in order.tolist()]
        return _Candidates(
            kinds, self.start[order], self.end[order], self.score[order], self.source[order], self.stage[order]
        )

    @classmethod
    def joined(cls, parts: Sequence[_Candidates]) -> _Candidates:
        def column(name: str) -> Any:
            return np.concatenate([getattr(part, name) for part in parts])

        kinds = [kind for part in parts for kind in part.kind]
        return cls(kinds, column("start"), column("end"), column("score"), column("source"), column("stage"))


def worst_moments(ledger: Ledger, intervals: TokenIntervals, blame: Blame, count: int = 10) -> list[Moment]:
    """The worst `count` moments, the worst first; fewer where the run has no more.

    A moment is an interval that takes twice what is typical or more, of a first token three times. Others that overlap
    it are merged into it: by half of the longer one, or, of the same kind, by half of the shorter one. It ranks by how
    many typical intervals all requests lost in it.
    """
    typical: dict[Kind, float] = {"tbt": _typical(intervals, is_ttft=False), "ttft": _typical(intervals, is_ttft=True)}
    computes = np.concatenate([lane.seconds for lane in ledger.lanes]) if ledger.lanes else np.zeros(0)
    typical["stall"] = float(np.median(computes)) if len(computes) else 0.0
    candidates = _candidates(ledger, intervals, typical).best()
    found: list[_Found] = []
    starts, ends = candidates.start.tolist(), candidates.end.tolist()
    for place, kind in enumerate(candidates.kind):
        into = None
        for each in found:
            overlap = min(ends[place], ends[each.place]) - max(starts[place], starts[each.place])
            lengths = ends[place] - starts[place], ends[each.place] - starts[each.place]
            bound = min(lengths) if kind == candidates.kind[each.place] else max(lengths)
            if overlap >= 0.5 * bound:
                into = each
                break
        if into is None and len(found) < count:
            found.append(into := _Found(place, 0.0))
        if into is not None:
            into.merged.append(place)
            into.score += float(candidates.score[place])
    found.sort(key=lambda each: -each.score)
    return [_moment(ledger, intervals, blame, candidates, each, typical) for each in found]


def _typical(intervals: TokenIntervals, is_ttft: bool) -> float:
    seconds = intervals.seconds[intervals.is_ttft == is_ttft]
    seconds = seconds[seconds > 0]
    return float(np.median(seconds)) if len(seconds) else 0.0


def _candidates(ledger: Ledger, intervals: TokenIntervals, typical: dict[Kind, float]) -> _Candidates:
    tbt = np.flatnonzero(~intervals.is_ttft)
    times = np.bincount(intervals.row[tbt], minlength=len(intervals.table))
    example = np.zeros(len(intervals.table), np.int64)
    example[intervals.row[tbt]] = tbt
    rows = np.flatnonzero(times)
    ttft = np.flatnonzero(intervals.is_ttft)
    parts: list[_Candidates] = []

    def add(kind: Kind, which: Ints, source: Ints, count: Ints) -> None:
        seconds, usual = intervals.seconds[which], typical[kind]
        bound = (_SLOW_FIRST if kind == "ttft" else _SLOW) * usual
        slow = np.flatnonzero(seconds >= bound) if usual > 0 else np.zeros(0, np.int64)
        score = (count * (seconds / max(usual, 1e-12) - 1.0))[slow]
        start, end, nowhere = intervals.start[which[slow]], intervals.end[which[slow]], np.full(len(slow), -1)
        parts.append(_Candidates([kind] * len(slow), start, end, score, source[slow], nowhere))

    add("tbt", example[rows], rows, times[rows])
    add("ttft", ttft, ttft, np.ones(len(ttft), np.int64))
    codes = [cause.code for cause in _NO_STALL]
    for stage, idle in enumerate(ledger.idle_columns):
        long = np.flatnonzero((idle.seconds >= _SLOW * max(typical["stall"], 1e-12)) & ~np.isin(idle.cause, codes))
        score = idle.seconds[long] / max(typical["tbt"], typical["stall"])
        where = np.full(len(long), stage)
        parts.append(_Candidates(["stall"] * len(long), idle.start[long], idle.end[long], score, long, where))
    return _Candidates.joined(parts)


def _moment(
    ledger: Ledger, intervals: TokenIntervals, blame: Blame, candidates: _Candidates, found: _Found,
    typical: dict[Kind, float],
) -> Moment:  # fmt: skip
    place = found.place
    kind, stage = candidates.kind[place], int(candidates.stage[place])
    merged = np.array(found.merged)
    is_slow = np.zeros(len(intervals.table), np.bool_)
    of_tbt = merged[[candidates.kind[one] == "tbt" for one in found.merged]]
    is_slow[candidates.source[of_tbt]] = True
    of_ttft = merged[[candidates.kind[one] == "ttft" for one in found.merged]]
    hit = np.union1d(np.flatnonzero(is_slow[intervals.row] & ~intervals.is_ttft), candidates.source[of_ttft])
    cost = blame.of(hit).cost if len(hit) else np.zeros(0)
    worst = [int(one) for one in np.argsort(-cost, kind="stable")[:_MOST_BLAMED] if cost[one] > 0]
    if kind == "stall":
        idle = ledger.idle_columns[stage]
        at = int(candidates.source[place])
        cause, excess, where = str(CAUSES[idle.cause[at]]), float(idle.seconds[at]), stage if stage >= 0 else None
    else:
        own = hit[intervals.is_ttft[hit] == (kind == "ttft")]
        cause, excess, where = _longer_part(intervals, own, intervals.is_ttft == (kind == "ttft"))
    return Moment(
        kind, float(candidates.start[place]), float(candidates.end[place]), typical[kind],
        len(np.unique(intervals.place[hit])), cause, where, excess, [(one, float(cost[one])) for one in worst],
    )  # fmt: skip


def _longer_part(intervals: TokenIntervals, hit: Ints, alike: Bools) -> tuple[str, float, int | None]:
    """The part in which the intervals `hit` are longer than all those `alike` by most; its seconds; its stage."""
    longer = intervals.table[intervals.row[hit]].mean(axis=0)
    usual = np.bincount(intervals.row[alike], minlength=len(intervals.table)) @ intervals.table
    longer = longer - usual / max(1, int(alike.sum()))
    found: list[tuple[float, str, int | None]] = [(float(longer[part]), part.name.lower(), None) for part in Part]
    for part in StagePart:
        stages = np.array([longer[stage_part(part, stage)] for stage in range(len(intervals.lanes))])
        found.append((float(stages.sum()), part.name.lower(), int(stages.argmax())))
    excess, name, stage = max(found, key=lambda each: each[0])
    return name, excess, stage
