"""Draws total lengths from a Zipf distribution and splits each by one P:D ratio: the paper's section 5.3."""

from __future__ import annotations

import numpy as np

from ....conf.workloads import ZipfConfig
from .workload import LENGTH_STREAM, DrawnRequests


def draw(config: ZipfConfig, num_requests: int) -> DrawnRequests:
    """Draw the lengths of `num_requests` requests.

    The k-th length, P + D = min_len - 1 + k, has a probability proportional to k^-theta.
    """
    ranks = np.arange(1, config.max_len - config.min_len + 2)
    cumulative = np.cumsum(ranks**-config.theta)
    drawn = np.random.default_rng((config.seed, LENGTH_STREAM)).random(num_requests) * cumulative[-1]
    totals = config.min_len + np.searchsorted(cumulative, drawn, side="right")
    outputs = np.clip(np.rint(totals / (1 + config.pd_ratio)), 1, totals - 1).astype(np.int64)
    return DrawnRequests(totals - outputs, outputs)
