"""Lengths from a Zipf law, cut at one P:D ratio: the workload of the paper's pipeline experiment (5.3)."""

from __future__ import annotations

import numpy as np

from ...conf.workloads import ZipfConfig
from .workload import LENGTHS, Drawn


def draw(config: ZipfConfig, num: int) -> Drawn:
    """Lengths of `num` requests: P(P + D = min_len - 1 + k) ~ k^-theta for k = 1 .. max_len - min_len + 1."""
    ranks = np.arange(1, config.max_len - config.min_len + 2)
    shares = np.cumsum(ranks**-config.theta)
    drawn = np.random.default_rng((config.seed, LENGTHS)).random(num) * shares[-1]
    totals = config.min_len + np.searchsorted(shares, drawn, side="right")
    outputs = np.clip(np.rint(totals / (1 + config.pd_ratio)), 1, totals - 1).astype(np.int64)
    return Drawn(totals - outputs, outputs)
