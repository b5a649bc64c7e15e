"""Stage costs learned from the spans of a run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ....conf.architecture import Architecture
from ...core.least_squares import non_negative
from ...core.micro_batch_columns import Floats
from ...simulation.cost.stage_costs import MicroBatchShape, StageCosts
from .learned_operators import (
    NUM_ATTENTION,
    NUM_OTHER,
    LayerWeights,
    LearnedOperators,
    LinkSeconds,
    pairs,
    product_columns,
)
from .observations import FAR_APART, Observations, SizesShown

_MOST_KNOTS = 5
_PASSES = 24  # of the fit, each starting from the weights and speeds of the previous one
_CONVERGED = 1e-4  # mean relative change of the predictions
_HUBER_BOUND = 1.345  # in scales of the residual: 95% as efficient as least squares for normal errors
_MAD_TO_SIGMA = 1.4826  # median absolute deviation to standard deviation, for normal errors
_HEAD_PRIOR = 2.0  # weight of the head's guess by its parameters, in observations
_SPEED_PRIOR = 4.0  # weight of the prior that stages have equal speed, in observations
_LEAST = 1e-3  # of the median time: floor of the times that the priors of head and gaps are relative to
_FEW_ROWS = 2  # least ratio of the knee to the most rows for these to count as bound by reading weights
_LARGER = 8  # times the most rows: size at which the device's rate bounds the time from below
_NEAR = 1.02  # the fit is pulled to that bound if it is below this multiple of it
_LARGE = 0.8  # of the most rows: micro-batches with at least this share are large
_GAP_PRIOR = 1.0  # weight of a guess for sizes that the run lacks, in observations
_DRIFT_WINDOW = 8  # micro-batches


class LayerFit:
    """Weights of a layer's features, shared by all stages, and a speed per stage, fitted to a run's spans.

    The fit is non-negative, on relative errors, robust to outliers (Huber), and allows for drifting machine speed. If
    the run does not separate the LM head from the layers, its time is guessed from its number of parameters.

    Attributes:
        weights: the fit.
        slower: slowdown of each stage relative to one of speed 1.
        shown: sizes of the micro-batches that it was fitted to.

    Args:
        layers: number of decoder layers of each stage.
        arch: the model's architecture; None: unknown.
        tile: rows to which a GEMM is padded.
        row_seconds: seconds per row and layer of large GEMMs, by the device's rate; 0: unknown.
    """

    def __init__(
        self,
        seen: Observations,
        layers: Sequence[int],
        arch: Architecture | None,
        *,
        tile: int,
        row_seconds: float = 0.0,
    ) -> None:
        self.shown = SizesShown.of(seen.shapes)
        self.key_share = _key_share(arch)
        self.layers = tuple(layers)
        self._tile, self._row_seconds = tile, row_seconds
        self._knee = self._knee_of(seen)
        rows = [shape.rows for shape in seen.shapes]
        self._gaps = _gaps(rows)
        knots = {*_knots(rows), *(middle for _, middle, _ in self._gaps), max(rows), self._knee}
        self._knots = tuple(sorted(knots))
        self._head_layers = 1.0 if arch is None else arch.embedding_params / arch.layer_params
        columns = [self._columns(shape) for shape in seen.shapes]
        self._fit(np.array(columns, np.float64), seen)

    def _knee_of(self, seen: Observations) -> int:
        """Return the rows for which the device's rate gives the largest micro-batches' time; theirs if not far more."""
        rows = np.array([shape.rows for shape in seen.shapes])
        most = int(rows.max())
        if not self._row_seconds:
            return most
        a_layer = float(np.median(seen.seconds[rows >= _LARGE * most] / np.maximum(self.layers, 1)))
        knee = round(a_layer / self._row_seconds)
        return knee if knee >= _FEW_ROWS * most else most

    def _columns(self, shape: MicroBatchShape) -> tuple[list[float], list[float]]:
        """Return the features of a layer, and of a last layer that computes attention and FFN for sampled rows only."""
        rows, sampled = shape.rows, shape.sampled
        products = self._products(rows)
        chunks = shape.chunks
        attention = [len(chunks), sum(pairs(*chunk) for chunk in chunks), shape.decodes, shape.context]
        whole = [*products, *attention]
        if sampled >= rows:
            return whole, whole
        of_sampled = self._products(sampled) if sampled else [0.0] * len(products)
        share = self.key_share
        mixed = [share * a + (1 - share) * b for a, b in zip(products, of_sampled, strict=True)]
        return whole, [*mixed, 0, 0, sampled, shape.context + shape.ended if sampled else 0]

    def _products(self, rows: float) -> list[float]:
        return product_columns(rows, self._knots, self._tile)

    def _fit(self, columns: Floats, seen: Observations) -> None:
        """Fit to `columns`, [n, 2, features]: features of a whole layer, and of the model's last layer.

        Each pass fits weights and speeds with Huber weights from the previous pass, then the machine's drift.
        """
        times = seen.seconds.T  # [S, n]
        design, guess = self._design(columns, seen), self._guess_of_head(seen)
        typical = float(np.median(times))
        slower, drift, scale = np.ones(len(times)), np.ones(times.shape[1]), np.full(len(times), 0.3)
        predicted, weights = times, None
        for _ in range(_PASSES):
            weight = _huber_weight(times, predicted, scale)
            scaled = design * (slower[:, None] * drift)[:, :, None]
            prior = self._prior_of_head(guess, weights, typical)
            gram = np.einsum("sni,sn,snj->ij", scaled, weight, scaled, optimize=True)
            moment = np.einsum("sni,sn,sn->i", scaled, weight, times, optimize=True)
            if weights is None:
                weights = non_negative(gram + prior, moment)
            else:
                prior += self._prior_of_gaps(weights, _LEAST * typical / max(self.layers))
                alone = design @ weights * drift
                weights, slower = _with_speeds(gram + prior, moment, scaled, weight, times, alone, slower)
            alone = np.maximum(design @ weights, 1e-9)  # [S, n] on a stage of speed 1
            drift = _drift(times / (alone * slower[:, None]))
            before, predicted = predicted, np.maximum(alone * slower[:, None] * drift, 1e-9)
            if np.abs(predicted / before - 1).mean() < _CONVERGED:
                break
            scale = _MAD_TO_SIGMA * np.median(np.abs(times / predicted - 1), axis=1)
        assert weights is not None
        # Run durations depend on means, but the fit is of typical times. Stalls have their own cause.
        is_usual = ~seen.stalls(predicted.T).T
        slower *= (times * is_usual).sum(axis=1) / (predicted / drift * is_usual).sum(axis=1)
        self.weights = LayerWeights(self._knots, self._tile, tuple(weights.tolist()))
        self.slower = tuple(slower.tolist())

    def _design(self, columns: Floats, seen: Observations) -> Floats:
        """Return the features of stage times, [S, n, features]: the layers', then the micro-batch's and the head's."""
        whole, last = columns[:, 0], columns[:, 1]
        design = np.zeros((len(self.layers), len(whole), whole.shape[1] + NUM_OTHER))
        for stage, count in enumerate(self.layers):
            is_last = stage == len(self.layers) - 1
            design[stage, :, : whole.shape[1]] = (count - is_last) * whole + (last if is_last else 0.0)
            design[stage, :, -NUM_OTHER] = 1.0
        sampled = np.array([shape.sampled for shape in seen.shapes], np.float64)
        design[-1, :, -2], design[-1, :, -1] = sampled > 0, sampled
        return design

    def _guess_of_head(self, seen: Observations) -> Floats:
        """Return [features]: the head's columns for a typical micro-batch, minus layers with as many parameters.

        Its product with the weights is assumed to be 0 if a run does not separate the head from the layers.
        """
        sampled = [shape.sampled for shape in seen.shapes if shape.sampled]
        middle = float(np.median(sampled)) if sampled else 1.0
        products = np.array(self._products(int(middle)))
        return np.concatenate([-self._head_layers * products, np.zeros(NUM_ATTENTION), [0.0, 1.0, middle]])

    def _prior_of_head(self, guess: Floats, weights: Floats | None, typical: float) -> Floats:
        """Return the normal equations of the head's guess, relative to its time by a fit so far, or a typical time."""
        seconds = typical if weights is None else max(-float(guess[:-2] @ weights[:-2]), _LEAST * typical)
        prior: Floats = _HEAD_PRIOR * np.outer(guess, guess) / seconds**2
        return prior

    def _prior_of_gaps(self, weights: Floats, lowest: float) -> Floats:
        """Return the normal equations of the guesses for sizes that the run lacks, by a fit so far.

        Guesses are relative to a layer's time, but to `lowest` seconds at least. Otherwise a layer with a fitted time
        near zero would gain weight with each pass, until the matrix overflows.

        Between two numbers of rows the guess is midway between linear interpolation and the bend of a roofline:
        constant or proportional to the rows, whichever is longer. Beyond the most rows it is linear extrapolation,
        bounded below by the device's rate; if the most rows are bound by reading weights, the time is constant up to
        the knee. If the device's rate is unknown, it is midway between linear extrapolation and proportionality.
        """
        n = len(self._products(1))
        found = np.zeros((len(weights), len(weights)))

        def at(rows: float) -> Floats:
            return np.array(self._products(rows))

        def add(row: Floats, guess: Floats) -> None:
            k = len(row)
            off = (row - guess) / max(float(row @ weights[:k]), lowest)
            found[:k, :k] += _GAP_PRIOR * np.outer(off, off)

        for low, middle, high in self._gaps:
            share = (middle - low) / (high - low)
            line = (1 - share) * at(low) + share * at(high)
            flat, proportional = at(low), at(high) * middle / high
            bend = flat if float((flat - proportional) @ weights[:n]) > 0 else proportional
            add(at(middle), (line + bend) / 2)
        most = self.shown.rows[-1]
        straight = 3 * at(most) - 2 * at(most / 2)
        if not self._row_seconds:
            add(at(2 * most), (straight + 2 * at(most)) / 2)
            return found
        large = _LARGER * most
        if self._knee > most:
            add(at(self._knee), at(most))
            large = 2 * self._knee
        shown, longer = self._whole(most), self._whole(large)
        seconds, least = float(shown @ weights), large * self._row_seconds
        if seconds and longer @ weights < _NEAR * least:
            add(longer, shown * (least / seconds))
        else:
            add(at(2 * most), straight)
        return found

    def _whole(self, rows: float) -> Floats:
        """Return the columns of a layer for one chunk, without pairs of tokens, with its share of the host time."""
        return np.array([*self._products(rows), 1.0, *(NUM_ATTENTION - 1) * [0.0], 1 / self.layers[0], 0.0, 0.0])

    def costs(self, layers: Sequence[int], links: Sequence[LinkSeconds]) -> StageCosts:
        """Return the costs of the run's stages with `layers` layers each."""
        operators = [
            LearnedOperators(self.weights, key_share=self.key_share, slower=slower, link=link)
            for slower, link in zip(self.slower, (*links, None), strict=True)
        ]
        return StageCosts(layers, operators)


def _huber_weight(times: Floats, predicted: Floats, scale: Floats) -> Floats:
    """Return Huber weights of relative errors, [S, n], with residual scales `scale` [S]."""
    bound = _HUBER_BOUND * np.maximum(scale, 1e-4)[:, None]
    return np.minimum(1.0, bound / np.maximum(np.abs(times / predicted - 1), 1e-12)) / predicted**2


def _with_speeds(
    gram: Floats, moment: Floats, scaled: Floats, weight: Floats, times: Floats, alone: Floats, slower: Floats
) -> tuple[Floats, Floats]:
    """Return the weights of the next pass, and the slowdown of each stage relative to the first.

    A stage's time is the product of both, so one Gauss-Newton step solves for both. Alternating fits would attribute
    the slowness of the last stage to the head.

    Args:
        gram: matrix of the normal equations of the weights, [f, f].
        moment: right-hand side of the normal equations, [f].
        scaled: the stages' columns, [S, n, f].
        weight: weight of each time, [S, n].
        times: measured times, [S, n].
        alone: times at speed 1 by the weights so far, [S, n].
        slower: slowdown of each stage so far, [S].
    """
    cross = np.einsum("sni,sn,sn->si", scaled, weight, alone, optimize=True)
    square, toward = (weight * alone**2).sum(axis=1), (weight * alone * times).sum(axis=1)
    f, later = len(moment), len(slower) - 1
    whole = np.zeros((f + 2 * later, f + 2 * later))  # a step may be negative: the difference of two parts
    target = np.zeros(f + 2 * later)
    whole[:f, :f], target[:f] = gram, moment
    for stage in range(1, later + 1):
        up, down = f + stage - 1, f + later + stage - 1
        for sign, place in ((1.0, up), (-1.0, down)):
            whole[place, :f] = whole[:f, place] = sign * cross[stage]
            target[place] = sign * (toward[stage] + _SPEED_PRIOR * (1 - slower[stage]))
        whole[up, up] = whole[down, down] = square[stage] + _SPEED_PRIOR
        whole[up, down] = whole[down, up] = -square[stage] - _SPEED_PRIOR
    found = non_negative(whole, target)
    faster = np.array([0.0, *(found[f : f + later] - found[f + later :])])
    return found[:f], np.clip(slower + faster, 0.5 * slower, 2 * slower)


def _drift(ratios: Floats) -> Floats:
    """Return the machine's slowdown at each micro-batch, [n], constant over windows of `_DRIFT_WINDOW`.

    A shared machine is slower for seconds at a time. The slowdown of a window is shrunk towards 1 by the share of the
    windows' variance that is noise.

    Args:
        ratios: measured over predicted times, without drift, [S, n].
    """
    stages, n = ratios.shape
    logs = np.log(np.maximum(ratios, 1e-9))
    windows = np.minimum(np.arange(n) // _DRIFT_WINDOW, max(0, n // _DRIFT_WINDOW - 1))
    whole = logs[:, : n // _DRIFT_WINDOW * _DRIFT_WINDOW].reshape(stages, -1, _DRIFT_WINDOW)
    middles = np.median(whole.swapaxes(0, 1).reshape(whole.shape[1], -1), axis=1)
    inside = _MAD_TO_SIGMA * float(np.median(np.abs(logs - middles[windows])))
    chance = np.pi / 2 * inside**2 / (stages * _DRIFT_WINDOW)  # variance of a median
    between = max(0.0, float(np.var(middles)) - chance)
    drift: Floats = np.exp(middles * between / (between + chance + 1e-12))[windows]
    return drift


def _knots(rows: Sequence[int]) -> tuple[int, ...]:
    """Return knots for a layer's time: numbers of rows, apart by a factor of 1.5 at least."""
    if not rows:
        return ()
    found: list[int] = []
    for quantile in np.percentile(rows, np.linspace(10, 95, 12)):
        knot = round(float(quantile))
        if knot >= 2 and knot < 0.8 * max(rows) and (not found or knot >= 1.5 * found[-1]):
            found.append(knot)
    if len(found) > _MOST_KNOTS:
        found = [found[round(i)] for i in np.linspace(0, len(found) - 1, _MOST_KNOTS)]
    return tuple(found)


def _gaps(rows: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return points within large gaps between shown numbers of rows: the number below, the point, the number above."""
    known = np.unique(np.maximum(rows, 1)).tolist()
    found = []
    for low, high in pairwise(known):
        parts = int(np.log(high / low) / np.log(FAR_APART))
        for part in range(1, parts + 1):
            middle = round(low * (high / low) ** (part / (parts + 1)))
            if low < middle < high:
                found.append((low, middle, high))
    return found


def _key_share(arch: Architecture | None) -> float:
    """Return the QKV projections' share of a layer's GEMMs, by their parameters."""
    if arch is None:
        return 0.25
    made = arch.hidden_size * arch.head_dim * (arch.num_heads + 2 * arch.num_kv_heads)
    return made / arch.layer_params
