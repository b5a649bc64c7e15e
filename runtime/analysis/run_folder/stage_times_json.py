"""`stage_times.json`: what a scheduler learned of how long stages take."""

from __future__ import annotations

import json

import msgspec

from ..core.features import FEATURES


class StageTimesFile(msgspec.Struct):
    """A stage takes as many seconds as its `weights` times the features of a micro-batch, summed."""

    weights: list[list[float]]  # [stages, features]
    features: list[str] | None = None  # their names


def stage_times_text(weights: list[list[float]]) -> str:
    """Return the contents of the file. It names the features only where there is a weight for each of them."""
    is_of_features = all(len(stage) == len(FEATURES) for stage in weights)
    return json.dumps({"features": list(FEATURES) if is_of_features else None, "weights": weights}) + "\n"


def read_stage_times(data: bytes) -> list[list[float]]:
    """Return the weights, [stages, features].

    Raises:
        ValueError: the data is not such a file's.
    """
    return msgspec.json.decode(data, type=StageTimesFile).weights
