"""Stage times of micro-batches, learned from the spans of the run itself: no profiling run is needed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...core.features import FEATURES, Features, weigh, weigh_all
from ...core.least_squares import non_negative

_FIRST_REFIT = 8  # micro-batches before the first fit
_REFIT_SHARE = 1 / 4  # new observations before the next fit, as a share of those already fitted
_REFIT_MOST = 128  # maximum micro-batches between fits
_WRONG_ERROR = 0.1  # relative error above which a prediction is wrong, if also above twice the noise
_WRONG_PREDICTIONS = 6  # excess of wrong over right predictions since the last fit that triggers a new one
_MEMORY = 1024  # micro-batches after which an observation counts 1/e
_HUBER_BOUND = 1.345  # in scales of the residual: 95% efficiency relative to least squares for normal errors
_MAD_TO_SIGMA = 1.4826  # median absolute deviation to standard deviation, for normal errors
_GUESS_WEIGHT = 0.3  # in observations: weight of the initial guess that only tokens count


class StageFit:
    """Fits non-negative weights of `Features` for each stage, in seconds, by robust least squares on relative errors.

    Old observations fade, and outliers count less (Huber). Before the first fit nothing is predicted. Fits become rarer
    as observations accumulate, but repeated wrong predictions trigger one early: micro-batches unlike all before, such
    as those of the first long prompt, depend on weights that earlier data hardly constrained.
    """

    def __init__(self, num_stages: int) -> None:
        n = len(FEATURES)
        self.num_stages = num_stages
        self.weights: npt.NDArray[np.float64] | None = None  # [stages, features]
        self.by_stage: list[list[float]] | None = None  # the same as lists
        self._gram = np.zeros((num_stages, n, n))
        self._moment = np.zeros((num_stages, n))
        self._scale = np.ones(n)  # the largest value of each feature so far: scaled features are of order one
        self._noise = np.full(num_stages, 0.1)  # scale of the relative residuals
        self.noise = 0.1  # mean over the stages of the scale of relative errors on observations after a fit
        self._rows: list[Features] = []
        self._counts: list[int] = []  # stages that have computed each row
        self._stages: list[int] = []
        self._seconds: list[float] = []
        self._num_seen = 0  # observations that were fitted
        self._wrong = 0  # wrong predictions less right ones since the last fit, at least 0

    @property
    def is_fitted(self) -> bool:
        """Whether there are weights to predict with."""
        return self.weights is not None

    def predict(self, row: Features) -> list[float] | None:
        """Return seconds by stage, None before the first fit."""
        return None if self.by_stage is None else weigh_all(self.by_stage, row)

    def observe(self, row: Features, stages: Sequence[int], seconds: Sequence[float]) -> None:
        """Add an observation: the `seconds` that each of `stages` took for a micro-batch with these features."""
        self._rows.append(row)
        self._counts.append(len(stages))
        self._stages += stages
        self._seconds += seconds
        if self.by_stage is not None:
            self._judge(row, stages[-1], seconds[-1])
        least, most = _FIRST_REFIT * self.num_stages, _REFIT_MOST * self.num_stages
        due = least if self._wrong >= _WRONG_PREDICTIONS else max(least, _REFIT_SHARE * self._num_seen)
        if len(self._stages) >= min(most, due):
            self._num_seen += len(self._stages)
            self._wrong = 0
            self._fit()

    def _judge(self, row: Features, stage: int, seconds: float) -> None:
        """Count whether the fit in use predicted this stage's time."""
        assert self.by_stage is not None
        predicted = weigh(self.by_stage[stage], row)
        is_wrong = abs(seconds - predicted) > max(_WRONG_ERROR, 2 * self.noise) * predicted
        self._wrong = max(0, self._wrong + (1 if is_wrong else -1))

    def _fit(self) -> None:
        """Add the observations since the last fit to the normal equations, and solve them."""
        x = np.repeat(np.array(self._rows), self._counts, axis=0)
        y, stage = np.maximum(np.array(self._seconds), 1e-9), np.array(self._stages)
        self._rows, self._counts, self._stages, self._seconds = [], [], [], []
        self._rescale(x.max(axis=0))
        x = x / self._scale
        fade = float(np.exp(-len(y) / self.num_stages / _MEMORY))
        by_stage, counts = np.argsort(stage, kind="stable"), np.bincount(stage, minlength=self.num_stages)
        if counts.min() == counts.max():  # as in simulations: all stages at once
            self._absorb(slice(None), x[by_stage], y[by_stage], fade)
        else:
            at = np.concatenate([[0], np.cumsum(counts)])
            for s in np.flatnonzero(counts).tolist():
                own = by_stage[at[s] : at[s + 1]]
                self._absorb(slice(s, s + 1), x[own], y[own], fade)
        self.weights = non_negative(self._gram, self._moment) / self._scale
        self.by_stage = self.weights.tolist()
        self.noise = float(self._noise.mean())

    def _absorb(
        self, stages: slice, rows: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64], fade: float
    ) -> None:
        """Add observations of `stages` (equally many per stage, stage by stage) to the normal equations.

        `rows` is [stages * n, features], `seconds` [stages * n]. Earlier observations count `fade` times as much.
        """
        gram, moment, noise = self._gram[stages], self._moment[stages], self._noise[stages]  # views
        rows, seconds = rows.reshape(len(gram), -1, rows.shape[-1]), seconds.reshape(len(gram), -1)
        gram *= fade
        moment *= fade
        for s in np.flatnonzero(~gram.any(axis=(1, 2))).tolist():
            self._start(range(self.num_stages)[stages][s], rows[s], seconds[s])
        weight = 1.0 / seconds**2
        if self.weights is not None:
            foreseen = (rows @ (self.weights[stages] * self._scale)[:, :, None])[:, :, 0]
            expected = np.maximum(foreseen, 0.1 * seconds)
            residual = np.abs(seconds - expected) / expected
            noise += 0.5 * (_MAD_TO_SIGMA * np.median(residual, axis=1) - noise)
            bound = _HUBER_BOUND * np.maximum(noise, 1e-3)[:, None]
            weight = np.minimum(1.0, bound / np.maximum(residual, 1e-12)) / np.maximum(seconds, expected) ** 2
        weighted = (rows * weight[:, :, None]).transpose(0, 2, 1)
        gram += weighted @ rows
        moment += (weighted @ seconds[:, :, None])[:, :, 0]

    def _start(self, stage: int, rows: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64]) -> None:
        """Start from the guess that only tokens count."""
        guess = np.zeros(len(FEATURES))
        guess[1] = seconds.sum() / max(rows[:, 1].sum(), 1e-12)
        strength = _GUESS_WEIGHT * (rows**2).mean(axis=0).clip(min=1e-6) / float(np.mean(seconds)) ** 2
        self._gram[stage] += np.diag(strength)
        self._moment[stage] += strength * guess

    def _rescale(self, largest: npt.NDArray[np.float64]) -> None:
        scale = np.maximum(self._scale, largest)
        ratio = self._scale / scale
        self._gram *= ratio[:, None] * ratio
        self._moment *= ratio
        self._scale = scale
