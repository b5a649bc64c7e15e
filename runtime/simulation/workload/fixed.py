"""Draws requests that all have the same lengths, or lengths uniform around them."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import replace
from typing import Any

import numpy as np

from ....conf.workloads import FixedConfig
from .workload import LENGTH_STREAM, DrawnRequests, Ints


def typical(config: FixedConfig) -> tuple[int, int]:
    """Return P and D. If the config has one of them only, the other follows from the P:D ratio."""
    if config.input_len is None:
        assert config.output_len is not None
        assert config.pd_ratio is not None
        return max(1, round(config.output_len * config.pd_ratio)), config.output_len
    if config.output_len is None:
        assert config.pd_ratio is not None
        return config.input_len, max(1, round(config.input_len / config.pd_ratio))
    return config.input_len, config.output_len


def longest(config: FixedConfig) -> int:
    """Return the largest P + D that a request may have."""
    return sum(_bounds(length, config.range_ratio)[1] for length in typical(config))


def fitting(config: FixedConfig, context: int) -> str:
    """Return, for an error message, lengths at which the requests fit into `context` tokens."""
    key = "output_len" if config.input_len is None else "input_len"

    def longest_with(length: int) -> int:
        changed: dict[str, Any] = {key: length}
        return longest(replace(config, **changed))

    fits = bisect_right(range(1, getattr(config, key)), context, key=longest_with)
    return f"workload.{key}={fits} fits" if fits else "lower workload.input_len and workload.output_len"


def draw(config: FixedConfig, num_requests: int) -> DrawnRequests:
    """Draw the lengths of `num_requests` requests, uniform over the integers within `range_ratio` of the given ones."""
    generator = np.random.default_rng((config.seed, LENGTH_STREAM))

    def lengths(length: int) -> Ints:
        low, high = _bounds(length, config.range_ratio)
        return generator.integers(low, high, num_requests, endpoint=True)

    inputs, outputs = map(lengths, typical(config))
    return DrawnRequests(inputs, outputs)


def _bounds(length: int, ratio: float) -> tuple[int, int]:
    return max(1, math.floor(length * (1 - ratio))), math.ceil(length * (1 + ratio))
