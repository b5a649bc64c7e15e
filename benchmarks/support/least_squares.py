"""Fits the constants of a config to measured times: least squares of log ratios, robust to outliers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt

C = TypeVar("C")
Array = npt.NDArray[np.float64]
Kind = Literal["positive", "share", "above_one", "above_half"]
_OUTLIER_AT = 0.08  # Huber threshold of the log ratio


class FreeConstants(Generic[C]):
    """Turns configs into vectors and back.

    `free` names the fields that vary and how each is bounded; a list varies element by element.
    """

    def __init__(self, base: C, free: Mapping[str, Kind]) -> None:
        self._base: Any = base
        self._free = dict(free)

    def vector(self, config: C) -> Array:
        """Return the free constants of a config as unbounded numbers."""
        parts = [_TO[kind](np.atleast_1d(getattr(config, name))) for name, kind in self._free.items()]
        return np.concatenate(parts)

    def config(self, vector: Array) -> C:
        """Return the base config with the free constants of `vector`."""
        values: dict[str, Any] = {}
        at = 0
        for name, kind in self._free.items():
            held = getattr(self._base, name)
            length = len(held) if isinstance(held, tuple) else 1
            found = _FROM[kind](vector[at : at + length]).tolist()
            values[name] = tuple(found) if isinstance(held, tuple) else found[0]
            at += length
        made: C = dataclasses.replace(self._base, **values)
        return made


def fit(
    space: FreeConstants[C],
    start: C,
    predict: Callable[[C], Array],
    seconds: Array,
    *,
    weights: Array | None = None,
    steps: int = 40,
) -> tuple[C, float]:
    """Fit predictions to `seconds`; returns the config and its loss, the mean Huber loss of the log ratios.

    Levenberg-Marquardt with finite differences finds a local optimum near `start`.
    """
    measured = np.log(seconds)
    weight = np.ones(len(seconds)) if weights is None else weights / weights.mean()

    def ratios(x: Array) -> Array:
        return np.log(predict(space.config(x))) - measured

    def loss(r: Array) -> float:
        a = np.abs(r)
        return float((weight * np.where(a < _OUTLIER_AT, a * a / 2, _OUTLIER_AT * (a - _OUTLIER_AT / 2))).mean())

    x = space.vector(start)
    r = ratios(x)
    least, damping = loss(r), 1e-2
    for _ in range(steps):
        jacobian = np.stack([(ratios(x + 1e-3 * one) - r) / 1e-3 for one in np.eye(len(x))], axis=1)
        pull = weight * np.minimum(1, _OUTLIER_AT / np.maximum(np.abs(r), 1e-12))
        gradient, curvature = jacobian.T @ (pull * r), jacobian.T @ (pull[:, None] * jacobian)
        before = least
        for _ in range(8):
            diagonal = np.diag(curvature) + 1e-5 * len(r)
            step = np.clip(np.linalg.solve(curvature + damping * np.diag(diagonal), -gradient), -0.7, 0.7)
            tried = ratios(x + step)
            if loss(tried) < least:
                x, r, least, damping = x + step, tried, loss(tried), max(damping / 5, 1e-6)
                break
            damping *= 6
        if before - least < 1e-5 * before:
            break
    return space.config(x), least


def _logit(share: Array) -> Array:
    bounded = np.clip(share, 1e-3, 1 - 1e-3)
    return np.log(bounded / (1 - bounded))


def _floored_log(value: Array) -> Array:
    return np.log(np.maximum(value, 1e-6))


_TO: dict[Kind, Callable[[Array], Array]] = {
    "positive": _floored_log,
    "share": _logit,
    "above_one": lambda value: _floored_log(value - 1),
    "above_half": lambda value: _floored_log(value - 0.5),
}
_FROM: dict[Kind, Callable[[Array], Array]] = {
    "positive": np.exp,
    "share": lambda x: 1 / (1 + np.exp(-x)),
    "above_one": lambda x: 1 + np.exp(x),
    "above_half": lambda x: 0.5 + np.exp(x),
}
