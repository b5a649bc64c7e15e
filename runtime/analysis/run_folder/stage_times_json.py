"""`stage_times.json`: the scheduler's learned stage-time model."""

from __future__ import annotations

import json

import msgspec

from ...core.features import FEATURES


class StageTimesFile(msgspec.Struct):
    """A stage's time in seconds is the dot product of its `weights` and a micro-batch's features."""

    weights: list[list[float]]  # [stages, features]
    features: list[str] | None = None  # their names


def stage_times_text(weights: list[list[float]]) -> str:
    """Return the contents of the file. It names the features only if there is one weight for each."""
    is_of_features = all(len(stage) == len(FEATURES) for stage in weights)
    return json.dumps({"features": list(FEATURES) if is_of_features else None, "weights": weights}) + "\n"


def read_stage_times(data: bytes) -> list[list[float]]:
    """Return the weights, [stages, features].

    Raises:
        ValueError: the data is not a valid `stage_times.json`.
    """
    return msgspec.json.decode(data, type=StageTimesFile).weights
