"""When requests arrive: all at once, at gamma-distributed gaps, or as a trace says."""

from __future__ import annotations

import math

import numpy as np

from ...conf.workloads import WorkloadConfig
from .workload import ARRIVALS, Floats


def arrivals(config: WorkloadConfig, num: int, times: Floats | None = None) -> Floats:
    """Seconds from the start of `num` requests, rising; the first is 0.

    `times` are the trace's own, which hold where `request_rate` is null. Else gaps have the mean 1 / rate and the
    shape `burstiness`: 1 is a Poisson process, less comes in bursts, more is smoother, `inf` ticks.
    """
    rate, shape = config.request_rate, config.burstiness
    if rate is None and times is not None:
        return times
    if rate is None or math.isinf(rate):
        return np.zeros(num)
    gaps = np.full(num, 1.0 / rate)
    if math.isfinite(shape):
        gaps = np.random.default_rng((config.seed, ARRIVALS)).gamma(shape, 1.0 / (rate * shape), num)
    gaps[:1] = 0.0
    return np.cumsum(gaps)
