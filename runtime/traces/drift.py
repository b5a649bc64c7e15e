"""A clock that drifts against another: the line between the bounds of their difference over time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..core.micro_batch_columns import Floats
from ..core.numbers import lower_envelope

_MOST_DRIFT = 1e-3  # seconds a second; a quartz that is off by more is broken
_ROUNDING = 1e-6  # seconds: traces round times to microseconds


@dataclass(frozen=True, slots=True)
class ClockLine:
    """A clock beside a reference: `ahead` seconds when the reference shows `at`, and `drift` more each second.

    `half_width`: how far the line may be off anywhere in the trace, in seconds.
    """

    ahead: float = 0.0
    drift: float = 0.0
    at: float = 0.0
    half_width: float = 0.0

    def on_reference(self, times: Floats) -> Floats:
        """Put times of the clock on the reference's."""
        return self.at + (times - self.at - self.ahead) / (1.0 + self.drift)


def drift_between(out_before: Floats, out_after: Floats, back_after: Floats, back_before: Floats) -> ClockLine | None:
    """Return the line of a clock beside its reference that all events allow; None if none does.

    Each line that fits is a point of a convex polygon; its corners touch the bounds twice. What comes back is the mean
    of the four corners that lie highest and lowest at both ends of the trace, which fits too.

    Args:
        out_before: times on the reference's clock, seconds, that came before
        out_after: these on the other clock.
        back_after: times on the reference's clock that came after
        back_before: these on the other clock.
    """
    times = np.concatenate([out_before, back_after])
    first, last = float(times.min()), float(times.max())
    at = (first + last) / 2
    upper = _hull(out_before - at, out_after - out_before + _ROUNDING / 2)
    lower = _hull(back_after - at, -(back_before - back_after - _ROUNDING / 2)) * np.array([1.0, -1.0])
    lines = _corners(upper, lower)
    if not len(lines):
        return None
    ends = np.array([first - at, last - at])
    heights = lines[:, :1] + lines[:, 1:] * ends  # [lines, 2]
    extreme = lines[[heights[:, 0].argmin(), heights[:, 0].argmax(), heights[:, 1].argmin(), heights[:, 1].argmax()]]
    ahead, drift = extreme.mean(axis=0).tolist()
    off = float(np.abs(heights - (ahead + drift * ends)).max())
    return ClockLine(ahead, drift, at, off)


def _hull(times: Floats, values: Floats) -> Floats:
    """Return the corners of the lower convex hull of points, as [n, 2], ascending in time."""
    order = np.lexsort((values, times))
    times, values = times[order], values[order]
    is_first = np.append(True, times[1:] > times[:-1])
    points = np.stack([times[is_first], values[is_first]], axis=1)
    return points[lower_envelope(*points.T.tolist())]


def _corners(upper: Floats, lower: Floats) -> Floats:
    """Return the corners of the polygon of lines (value at time 0, slope) that lie under `upper` and over `lower`."""
    slopes, through = [], []
    for own in (upper, lower):
        slopes.append(np.diff(own[:, 1]) / np.diff(own[:, 0]))
        through.append(own[:-1])
        for steepest in (-_MOST_DRIFT, _MOST_DRIFT):
            slopes.append(np.full(len(own), steepest))
            through.append(own)
    one, other = np.repeat(upper, len(lower), axis=0), np.tile(lower, (len(upper), 1))
    apart = one[:, 0] != other[:, 0]
    one, other = one[apart], other[apart]
    slopes.append((one[:, 1] - other[:, 1]) / (one[:, 0] - other[:, 0]))
    through.append(one)
    slope, point = np.concatenate(slopes), np.concatenate(through)
    height = point[:, 1] - slope * point[:, 0]
    over = upper[:, 1] - (height[:, None] + slope[:, None] * upper[:, 0])
    under = height[:, None] + slope[:, None] * lower[:, 0] - lower[:, 1]
    fits = (over.min(axis=1) >= -1e-9) & (under.min(axis=1) >= -1e-9) & (np.abs(slope) <= _MOST_DRIFT * (1 + 1e-9))
    return np.stack([height[fits], slope[fits]], axis=1)
