"""The compute cost of a request's tokens on each stage: feature weights learned from a run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...core.features import FEATURES
from ...core.least_squares import non_negative
from ...core.micro_batch_columns import Floats
from ...core.run_record import RunRecord
from .lanes import Lane
from .micro_batch_paths import MicroBatchPaths

_TOKENS = FEATURES.index("tokens")
_LEAST_SHARE = 1e-6  # minimum share of a micro-batch's time for its tokens, if a fit finds that they cost nothing


def stage_weights(record: RunRecord, paths: MicroBatchPaths, lanes: Sequence[Lane], features: Floats) -> Floats:
    """Return the seconds per unit of each feature, [stages, features]; the token weight is always positive.

    They are the scheduler's learned weights, or else a least-squares fit of relative errors over the run's spans.

    Args:
        record: the run's record.
        paths: the run's completed micro-batches.
        lanes: the micro-batches of each stage.
        features: [R, features] of each completed micro-batch.
    """
    stages, count = len(lanes), len(FEATURES)
    if record.stage_weights is not None and [len(row) for row in record.stage_weights] == [count] * stages:
        weights = np.array(record.stage_weights, np.float64)
    else:
        weights = _fitted(paths, lanes, features)
    tokens = max(1.0, float(features[:, _TOKENS].max(initial=0.0)))
    for stage, lane in enumerate(lanes):
        typical = float(np.median(lane.seconds)) if len(lane.begin) else 0.0
        weights[stage, _TOKENS] = max(weights[stage, _TOKENS], _LEAST_SHARE * (typical or 1.0) / tokens)
    return weights


def _fitted(paths: MicroBatchPaths, lanes: Sequence[Lane], features: Floats) -> Floats:
    scale = np.maximum(features.max(axis=0, initial=0.0), 1e-12)
    gram, moment = np.zeros((len(lanes), len(FEATURES), len(FEATURES))), np.zeros((len(lanes), len(FEATURES)))
    for stage, lane in enumerate(lanes):
        place = paths.lane_place[:, stage]
        own = np.flatnonzero(place >= 0)
        seconds = lane.seconds[place[own]]
        told = seconds > 0
        rows = features[own[told]] / scale / seconds[told, None]  # to minimize relative errors
        gram[stage], moment[stage] = rows.T @ rows, rows.sum(axis=0)
    weights: Floats = non_negative(gram, moment) / scale
    return weights
