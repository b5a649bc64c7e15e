"""How far a measured cost model is off: on points of the grid that it was not given, and on whole stages."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ..cost.measured import ChunkAttention, Curve, DecodeAttention, medians
from ..cost.operators import LAYER_LINEARS
from ..cost.profile_folder import OperatorSample, StageSample
from ..cost.profile_point import Point
from ..cost.stage_costs import StageCosts

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Error:
    """|predicted / measured - 1| over `points`: median and 90th percentile; `bias` is the median with its sign.
    `scatter`: median over the points of how far half of their measurements lie from their median, the noise that no
    prediction can foresee."""

    what: str
    points: int
    bias: float
    median: float
    p90: float
    scatter: float


def held_out_errors(samples: Sequence[OperatorSample]) -> list[Error]:
    """By operator: every second length, prefix, number and context within the grid is left out and predicted from the
    rest."""
    first, last = min(s.stage for s in samples), max(s.stage for s in samples)
    errors = [
        _curve_error(name, ((s.point.rows, s.seconds[name]) for s in samples)) for name in (*LAYER_LINEARS, "others")
    ]
    decodes = [s for s in samples if s.point.decodes]
    errors += [
        _curve_error("embedding", ((s.point.rows, s.seconds["embedding"]) for s in samples if s.stage == first)),
        _curve_error("head", ((s.point.decodes, s.seconds["head"]) for s in decodes if s.stage == last)),
        _attention_error("attn, chunks", [s for s in samples if s.point.chunk]),
        _attention_error("attn, decodes", decodes),
    ]
    return [error for error in errors if error.points]


def send_error(stages: Sequence[StageSample]) -> list[Error]:
    """The same of sends between stages, over their rows."""
    error = _curve_error("send", ((s.point.rows, s.wait) for s in stages if s.in_flight == 1 and s.stage > 0))
    return [error] if error.points else []


def stage_errors(costs: StageCosts, stages: Sequence[StageSample]) -> list[Error]:
    """By stage: whole micro-batches, chunks and decodes together, through the real pipeline, none of which the cost
    model was given."""
    errors = []
    for stage in sorted({sample.stage for sample in stages}):
        crowded = [s for s in stages if s.stage == stage and s.point.decodes and s.point.chunk]
        predicted = {s.point: costs.seconds(s.point.load)[stage] for s in crowded}
        errors.append(_error(f"stage {stage}", ((s.point, s.compute) for s in crowded), predicted.__getitem__))
    return [error for error in errors if error.points]


def _curve_error(what: str, pairs: Iterable[tuple[int, float]]) -> Error:
    measured = list(pairs)
    out = _every_second(size for size, _ in measured)
    if not out:
        return _error(what, [], lambda size: 0.0)
    curve = Curve(medians((size, seconds) for size, seconds in measured if size not in out))
    return _error(what, [(size, seconds) for size, seconds in measured if size in out], curve)


def _attention_error(what: str, samples: Sequence[OperatorSample]) -> Error:
    out = _left_out({sample.point for sample in samples})
    kept, unseen = ([(s.point, s.seconds["attn"]) for s in samples if (s.point in out) is of] for of in (False, True))
    if not unseen:
        return _error(what, [], lambda point: 0.0)
    if samples[0].point.chunk:
        chunk = ChunkAttention(medians(((point.chunk, point.prefix), seconds) for point, seconds in kept))
        return _error(what, unseen, lambda point: chunk(point.chunk, point.prefix))
    decode = DecodeAttention(medians(((point.decodes, point.context), seconds) for point, seconds in kept))
    return _error(what, unseen, lambda point: decode(point.decodes, point.decodes * point.context))


def _left_out(points: set[Point]) -> set[Point]:
    """Of chunks or of decodes."""
    bare = _every_second(p.chunk for p in points if not p.prefix)
    lengths = _every_second(p.chunk for p in points if p.prefix)
    prefixes = _every_second(p.prefix for p in points if p.prefix)
    numbers, contexts = _every_second(p.decodes for p in points), _every_second(p.context for p in points)
    return {
        p for p in points
        if p.chunk in (lengths if p.prefix else bare) or p.prefix in prefixes or p.decodes in numbers
        or p.context in contexts
    }  # fmt: skip


def _every_second(values: Iterable[int]) -> set[int]:
    """Within the range, of the values that there are."""
    return set(sorted(set(values))[1:-1:2])


def _error(what: str, pairs: Iterable[tuple[K, float]], predict: Callable[[K], float]) -> Error:
    measured = list(pairs)
    middle = medians(measured)
    if not middle:
        return Error(what, 0, 0.0, 0.0, 0.0, 0.0)
    off = np.array([predict(key) / seconds - 1 for key, seconds in middle.items()])
    spread = medians((key, abs(seconds / middle[key] - 1)) for key, seconds in measured)
    median, p90 = np.percentile(np.abs(off), [50, 90]).tolist()
    return Error(what, len(off), float(np.median(off)), median, p90, float(np.median(list(spread.values()))))
