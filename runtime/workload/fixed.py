"""Requests that are all alike, or vary evenly around one length."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import replace
from typing import Any

import numpy as np

from ...conf.workloads import FixedConfig
from .workload import LENGTHS, Drawn, Ints


def typical(config: FixedConfig) -> tuple[int, int]:
    """P and D, the one that is null by the P:D ratio."""
    if config.input_len is None:
        assert config.output_len is not None
        assert config.pd_ratio is not None
        return max(1, round(config.output_len * config.pd_ratio)), config.output_len
    if config.output_len is None:
        assert config.pd_ratio is not None
        return config.input_len, max(1, round(config.input_len / config.pd_ratio))
    return config.input_len, config.output_len


def longest(config: FixedConfig) -> int:
    """P + D at the most."""
    return sum(_bounds(length, config.range_ratio)[1] for length in typical(config))


def fitting(config: FixedConfig, context: int) -> str:
    """What makes requests that are too long fit into `context` tokens, in words."""
    key = "output_len" if config.input_len is None else "input_len"

    def longest_with(length: int) -> int:
        given: dict[str, Any] = {key: length}
        return longest(replace(config, **given))

    fits = bisect_right(range(1, getattr(config, key)), context, key=longest_with)
    return f"workload.{key}={fits} fits" if fits else "lower workload.input_len and workload.output_len"


def draw(config: FixedConfig, num: int) -> Drawn:
    """Lengths of `num` requests; each is uniform over whole numbers where `range_ratio` is above 0."""
    generator = np.random.default_rng((config.seed, LENGTHS))

    def lengths(length: int) -> Ints:
        low, high = _bounds(length, config.range_ratio)
        return generator.integers(low, high, num, endpoint=True)

    inputs, outputs = map(lengths, typical(config))
    return Drawn(inputs, outputs)


def _bounds(length: int, ratio: float) -> tuple[int, int]:
    return max(1, math.floor(length * (1 - ratio))), math.ceil(length * (1 + ratio))
