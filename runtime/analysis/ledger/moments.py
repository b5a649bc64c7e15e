"""The worst moments of a run: tokens that took much longer than typical, and long stage stalls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from ...core.micro_batch_columns import Floats, Ints
from .blame import Blame
from .causes import CAUSES, Cause
from .ledger import Ledger
from .request_segments import Bools
from .token_intervals import Part, StagePart, TokenIntervals, stage_part

Kind = Literal["tbt", "ttft", "stall"]
_KINDS: tuple[Kind, ...] = get_args(Kind)

_SLOW = 2.0  # least multiple of the typical interval that counts
_SLOW_FIRST = 3.0  # the same for TTFTs: if all requests arrive at once, the last waits twice the median
_MOST_CANDIDATES = 2000
_MOST_BLAMED = 3
_NO_STALL = (Cause.FILL_DRAIN, Cause.STARVED_NO_REQUEST)


@dataclass(frozen=True, slots=True)
class Moment:
    """A time in which tokens were slow or a stage stalled. Times are seconds on the coordinator's clock.

    Attributes:
        kind: kind of its worst interval.
        start: start of that interval.
        end: end of that interval.
        typical: seconds of a typical interval of this kind; for a stall, of a typical compute.
        requests: how many requests had a slow interval then.
        cause: the part with the largest excess over the average interval, such as `compute` or `queue`, summed over
            stages; for a stall, the cause of the idle time.
        stage: the stage with the largest excess, if the part occurs on stages; for a stall, its stage.
        excess: mean seconds of that excess; for a stall, its seconds.
        blamed: indices and seconds of the requests that cost the slow intervals most, most first.
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
        """How long the moment took."""
        return self.end - self.start


# A slow interval; equal token intervals share one entry. `kind`: an index into `_KINDS`. `score`: its excess in typical
# lengths, times the requests. `source`: the row in the table of token intervals, a TTFT's index, or the index among the
# idle intervals of `stage`.
_FIELDS = {"kind": "i8", "start": "f8", "end": "f8", "score": "f8", "source": "i8", "stage": "i8"}
_CANDIDATE = np.dtype(list(_FIELDS.items()))
_Candidates = npt.NDArray[np.void]  # [n] of `_CANDIDATE`


@dataclass(slots=True)
class _Found:
    """A moment: the indices of its worst interval and of all intervals merged into it, among the candidates."""

    place: int
    score: float
    merged: list[int] = field(default_factory=list)


def worst_moments(ledger: Ledger, intervals: TokenIntervals, blame: Blame, count: int = 10) -> list[Moment]:
    """Return the worst `count` moments, the worst first; fewer if the run has no more.

    A moment is an interval of at least twice the typical length (a TTFT: three times). Intervals that overlap it by
    half of the longer one, or, for the same kind, by half of the shorter one, are merged into it. Moments rank by how
    many typical intervals all requests lost.
    """
    typical: dict[Kind, float] = {"tbt": _typical(intervals, is_ttft=False), "ttft": _typical(intervals, is_ttft=True)}
    computes = np.concatenate([lane.seconds for lane in ledger.lanes]) if ledger.lanes else np.zeros(0)
    typical["stall"] = float(np.median(computes)) if len(computes) else 0.0
    candidates = _candidates(ledger, intervals, typical)
    candidates = candidates[np.argsort(-candidates["score"], kind="stable")[:_MOST_CANDIDATES]]
    found: list[_Found] = []
    listed = candidates.tolist()
    for place, (kind, start, end, score, *_) in enumerate(listed):
        into = None
        for each in found:
            other, begin, until, *_ = listed[each.place]
            lengths = end - start, until - begin
            bound = min(lengths) if kind == other else max(lengths)
            if min(end, until) - max(start, begin) >= 0.5 * bound:
                into = each
                break
        if into is None and len(found) < count:
            found.append(into := _Found(place, 0.0))
        if into is not None:
            into.merged.append(place)
            into.score += score
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

    def put(kind: Kind, start: Floats, end: Floats, score: Floats, source: Ints, stage: int = -1) -> None:
        part = np.empty(len(start), _CANDIDATE)
        for name, column in zip(_FIELDS, (_KINDS.index(kind), start, end, score, source, stage), strict=True):
            part[name] = column
        parts.append(part)

    def add(kind: Kind, which: Ints, source: Ints, count: Ints) -> None:
        seconds, usual = intervals.seconds[which], typical[kind]
        bound = (_SLOW_FIRST if kind == "ttft" else _SLOW) * usual
        slow = np.flatnonzero(seconds >= bound) if usual > 0 else np.zeros(0, np.int64)
        score = (count * (seconds / max(usual, 1e-12) - 1.0))[slow]
        put(kind, intervals.start[which[slow]], intervals.end[which[slow]], score, source[slow])

    add("tbt", example[rows], rows, times[rows])
    add("ttft", ttft, ttft, np.ones(len(ttft), np.int64))
    codes = [cause.code for cause in _NO_STALL]
    for stage, idle in enumerate(ledger.idle_columns):
        long = np.flatnonzero((idle.seconds >= _SLOW * max(typical["stall"], 1e-12)) & ~np.isin(idle.cause, codes))
        score = idle.seconds[long] / max(typical["tbt"], typical["stall"])
        put("stall", idle.start[long], idle.end[long], score, long, stage)
    return np.concatenate(parts)


def _moment(
    ledger: Ledger,
    intervals: TokenIntervals,
    blame: Blame,
    candidates: _Candidates,
    found: _Found,
    typical: dict[Kind, float],
) -> Moment:
    code, start, end, _, source, of_stage = candidates[found.place].tolist()
    kind, stage = _KINDS[code], of_stage if of_stage >= 0 else None
    merged = candidates[found.merged]
    sources = {each: merged["source"][merged["kind"] == _KINDS.index(each)] for each in _KINDS}
    is_slow = np.zeros(len(intervals.table), np.bool_)
    is_slow[sources["tbt"]] = True
    hit = np.union1d(np.flatnonzero(is_slow[intervals.row] & ~intervals.is_ttft), sources["ttft"])
    cost = blame.of(hit).cost if len(hit) else np.zeros(0)
    worst = [int(one) for one in np.argsort(-cost, kind="stable")[:_MOST_BLAMED] if cost[one] > 0]
    if kind == "stall":
        idle = ledger.idle_columns[of_stage]
        cause, excess = str(CAUSES[idle.cause[source]]), float(idle.seconds[source])
    else:
        own = hit[intervals.is_ttft[hit] == (kind == "ttft")]
        cause, excess, stage = _longer_part(intervals, own, intervals.is_ttft == (kind == "ttft"))
    requests, blamed = len(np.unique(intervals.place[hit])), [(one, float(cost[one])) for one in worst]
    return Moment(kind, start, end, typical[kind], requests, cause, stage, excess, blamed)


def _longer_part(intervals: TokenIntervals, hit: Ints, alike: Bools) -> tuple[str, float, int | None]:
    """Return the part in which the intervals `hit` exceed the mean of `alike` the most, the excess, and the stage."""
    longer = intervals.table[intervals.row[hit]].mean(axis=0)
    usual = np.bincount(intervals.row[alike], minlength=len(intervals.table)) @ intervals.table
    longer = longer - usual / max(1, int(alike.sum()))
    found: list[tuple[float, str, int | None]] = [(float(longer[part]), part.name.lower(), None) for part in Part]
    for part in StagePart:
        stages = np.array([longer[stage_part(part, stage)] for stage in range(len(intervals.lanes))])
        found.append((float(stages.sum()), part.name.lower(), int(stages.argmax())))
    excess, name, stage = max(found, key=lambda each: each[0])
    return name, excess, stage
