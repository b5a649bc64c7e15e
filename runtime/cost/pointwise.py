"""Time of kernels that compute row by row: norms, rotary embedding, activation, residuals, copies."""

from __future__ import annotations

from collections.abc import Iterable

from ...conf.costs import PointwiseConfig


class Pointwise:
    """Time of such kernels, one after the other: each takes the way of a row, or all bytes at its rate.

    Args:
        kernels: of each the elements of a row that one multiprocessor goes through, the bytes it reads and writes for
            a row, and its rate in GB/s.
    """

    def __init__(self, config: PointwiseConfig, kernels: Iterable[tuple[float, float, float]]) -> None:
        self._kernels = [
            (config.launch_us * 1e-6 + width * config.element_ns * 1e-9, size / (rate * 1e9))
            for width, size, rate in kernels
        ]

    def seconds(self, rows: int) -> float:
        """For `rows` tokens."""
        return sum([max(way, rows * row) for way, row in self._kernels])
