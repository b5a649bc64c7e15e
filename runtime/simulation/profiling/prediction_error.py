"""The errors of a measured cost model: on grid points held out of its fit, and on whole stages."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ..cost.interpolation import ChunkAttention, Curve, DecodeAttention, medians
from ..cost.operators import LAYER_LINEARS
from ..cost.profile_folder import OperatorSample, StageSample
from ..cost.profile_point import Point
from ..cost.stage_costs import StageCosts

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class PredictionError:
    """The relative errors of predictions, predicted / measured - 1, over a number of points.

    `bias` is the median error. `median` and `p90` are percentiles of the absolute errors. `scatter` is the noise of the
    measurements, which no prediction can avoid: the median over points of a point's median relative deviation.
    """

    what: str  # what is predicted: an operator, "send" or a stage
    points: int
    bias: float
    median: float
    p90: float
    scatter: float


def held_out_errors(samples: Sequence[OperatorSample]) -> list[PredictionError]:
    """Compute the error for each operator on points left out of the fit.

    Every second length, prefix, number of decodes and context within the grid is left out and predicted from the rest.
    """
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


def send_errors(stages: Sequence[StageSample]) -> list[PredictionError]:
    """Compute the error of predicted send times on points left out of the fit; empty if no sends were measured."""
    error = _curve_error("send", ((s.point.rows, s.wait) for s in stages if s.in_flight == 1 and s.stage > 0))
    return [error] if error.points else []


def stage_errors(costs: StageCosts, stages: Sequence[StageSample]) -> list[PredictionError]:
    """Compute the error for each stage on whole micro-batches of chunks and decodes through the real pipeline.

    These micro-batches are not part of the fit.
    """
    errors = []
    for stage in sorted({sample.stage for sample in stages}):
        mixed = [s for s in stages if s.stage == stage and s.point.decodes and s.point.chunk]
        predicted = {s.point: costs.seconds(s.point.shape)[stage] for s in mixed}
        errors.append(_error(f"stage {stage}", ((s.point, s.compute) for s in mixed), predicted.__getitem__))
    return [error for error in errors if error.points]


def _curve_error(what: str, pairs: Iterable[tuple[int, float]]) -> PredictionError:
    measured = list(pairs)
    held_out = _every_second(size for size, _ in measured)
    if not held_out:
        return _error(what, [], lambda size: 0.0)
    curve = Curve(medians((size, seconds) for size, seconds in measured if size not in held_out))
    return _error(what, [(size, seconds) for size, seconds in measured if size in held_out], curve)


def _attention_error(what: str, samples: Sequence[OperatorSample]) -> PredictionError:
    held_out = _held_out_points({sample.point for sample in samples})
    fitted = [(s.point, s.seconds["attn"]) for s in samples if s.point not in held_out]
    unseen = [(s.point, s.seconds["attn"]) for s in samples if s.point in held_out]
    if not unseen:
        return _error(what, [], lambda point: 0.0)
    if samples[0].point.chunk:
        chunk = ChunkAttention(medians(((point.chunk, point.prefix), seconds) for point, seconds in fitted))
        return _error(what, unseen, lambda point: chunk(point.chunk, point.prefix))
    decode = DecodeAttention(medians(((point.decodes, point.context), seconds) for point, seconds in fitted))
    return _error(what, unseen, lambda point: decode(point.decodes, point.decodes * point.context))


def _held_out_points(points: set[Point]) -> set[Point]:
    """Choose the points to leave out of a fit of attention. `points` are either all chunks or all decodes."""
    bare = _every_second(p.chunk for p in points if not p.prefix)
    lengths = _every_second(p.chunk for p in points if p.prefix)
    prefixes = _every_second(p.prefix for p in points if p.prefix)
    numbers, contexts = _every_second(p.decodes for p in points), _every_second(p.context for p in points)
    return {
        p
        for p in points
        if p.chunk in (lengths if p.prefix else bare)
        or p.prefix in prefixes
        or p.decodes in numbers
        or p.context in contexts
    }


def _every_second(values: Iterable[int]) -> set[int]:
    """Choose every second of the distinct values, but neither the smallest nor the largest."""
    return set(sorted(set(values))[1:-1:2])


def _error(what: str, pairs: Iterable[tuple[K, float]], predict: Callable[[K], float]) -> PredictionError:
    measured = list(pairs)
    expected = medians(measured)
    if not expected:
        return PredictionError(what, 0, 0.0, 0.0, 0.0, 0.0)
    errors = np.array([predict(key) / seconds - 1 for key, seconds in expected.items()])
    deviations = medians((key, abs(seconds / expected[key] - 1)) for key, seconds in measured)
    scatter = float(np.median(list(deviations.values())))
    median, p90 = np.percentile(np.abs(errors), [50, 90]).tolist()
    return PredictionError(what, len(errors), float(np.median(errors)), median, p90, scatter)
