"""Predicts the time of kernels that compute row by row: norms, rotary embedding, activation, residuals, copies."""

from __future__ import annotations

from collections.abc import Iterable

from ....conf.costs import PointwiseConfig


class Pointwise:
    """Predicts the total time of a sequence of kernels.

    A kernel takes the larger of two times: the latency of one row, and the time to move all bytes at its rate.

    Args:
        kernels: for each kernel, the elements per row that one multiprocessor computes, the bytes read and written per
            row, and the rate in GB/s.
    """

    def __init__(self, config: PointwiseConfig, kernels: Iterable[tuple[float, float, float]]) -> None:
        self._kernels = [
            (config.launch_us * 1e-6 + width * config.element_ns * 1e-9, size / (rate * 1e9))
            for width, size, rate in kernels
        ]

    def seconds(self, rows: int) -> float:
        """Return the seconds for `rows` tokens."""
        return sum([max(latency, rows * per_row) for latency, per_row in self._kernels])
