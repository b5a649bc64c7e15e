"""Draws arrival times: all at once, with gamma-distributed gaps, or from a trace."""

from __future__ import annotations

import math

import numpy as np

from ....conf.workloads import WorkloadConfig
from .workload import ARRIVAL_STREAM, Floats


def arrivals(config: WorkloadConfig, num_requests: int, trace_times: Floats | None = None) -> Floats:
    """Return the arrival times of `num_requests` requests, in seconds from the start, ascending. The first is 0.

    If `request_rate` is null, requests arrive at the times of the trace, or without a trace all at once. Otherwise gaps
    are gamma-distributed with mean 1 / rate and shape `burstiness`: 1 is a Poisson process, below 1 arrivals are
    bursty, above 1 they are smoother, and `inf` gives constant gaps.
    """
    rate, shape = config.request_rate, config.burstiness
    if rate is None and trace_times is not None:
        return trace_times
    if rate is None or math.isinf(rate):
        return np.zeros(num_requests)
    gaps = np.full(num_requests, 1.0 / rate)
    if math.isfinite(shape):
        generator = np.random.default_rng((config.seed, ARRIVAL_STREAM))
        gaps = generator.gamma(shape, 1.0 / (rate * shape), num_requests)
    gaps[:1] = 0.0
    return np.cumsum(gaps)
