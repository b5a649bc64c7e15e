"""Time of a matrix product on a device that computes it in tiles."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ...conf.costs import GemmConfig

Floats = npt.NDArray[np.float64]
Size = int | Floats

_SPLITS = (1, 2, 3, 4, 5, 6, 8, 10)  # of the inner dimension
_INNER = 64  # elements of the inner dimension that a tile takes at a time
_AREA = 256 * 128  # of the tile that wave_us is of
_WORK = 1e11  # FLOP of the product that the rates of tiles are of
_POWER = 6  # order of the norm that joins the time by waves and that at the sustained rate


class Gemm:
    """Time of [rows, inputs] x [inputs, outputs].

    A library has kernels of several tile shapes, with and without splitting the inner dimension, and is taken to
    choose the fastest. A kernel computes whole tiles, as many at once as there are multiprocessors: tiles come in
    waves, and a last wave that is not full is paid for in part. Clocks fall as kernels get longer, nor does the whole
    device go beyond a rate that its power sustains, however tiles fall. Against that stands the time to read and write
    the matrices once; the two are joined by a norm, since near the roofline's knee both cost.

    Args:
        multiprocessors: of the device.
        dtype_bytes: of an element; rates are those of 2, and fall with its size.
    """

    def __init__(self, config: GemmConfig, multiprocessors: int, dtype_bytes: int) -> None:
        kernels = [
            (*sides, inner, whole, split)
            for shape, inner, whole in self._tiles(config, multiprocessors, dtype_bytes)
            for sides in dict.fromkeys((shape, shape[::-1]))
            for split in _SPLITS
        ]
        self._config = config
        self._multiprocessors = multiprocessors
        self._dtype_bytes = dtype_bytes
        # Of each kernel: rows and columns of a tile, us an element of k, whole_waves, into how many parts k is split.
        self._rows, self._columns, self._inner_us, self._whole, self._split = np.array(kernels, np.float64).T
        self._wave_us = config.wave_us * self._rows * self._columns / _AREA
        is_split = self._split > 1
        self._fixed_us = config.launch_us + np.where(is_split, config.split_us, 0.0)
        self._parts = np.where(is_split, self._split, 0.0)  # partial results
        self._weights: dict[tuple[int, int], tuple[Floats, Floats]] = {}

    @staticmethod
    def _tiles(
        config: GemmConfig, multiprocessors: int, dtype_bytes: int
    ) -> Iterator[tuple[tuple[int, int], float, float]]:
        """Shapes, us an element of the inner dimension, whole_waves."""
        for text, tflops, whole in zip(config.tiles, config.tflops, config.whole_waves, strict=True):
            rows, columns = map(int, text.split("x"))
            yield (rows, columns), 2 * rows * columns * multiprocessors / (tflops * 1e6) * dtype_bytes / 2, whole

    def seconds(self, rows: int, inputs: int, outputs: int) -> float:
        """Of the fastest kernel."""
        weights = self._weights.get((inputs, outputs))
        if weights is None:
            weights = self._weights[inputs, outputs] = self._of_weights(inputs, outputs)
        return float(self._candidates(rows, inputs, outputs, weights).min())

    def candidates(self, rows: Floats, inputs: Floats, outputs: Floats) -> Floats:
        """Seconds by each kernel, [..., kernels], of sizes [..., 1]."""
        return self._candidates(rows, inputs, outputs, self._of_weights(inputs, outputs))

    def _of_weights(self, inputs: Size, outputs: Size) -> tuple[Floats, Floats]:
        """By each kernel, whatever the rows: blocks in a row of tiles, and us of a wave."""
        blocks = np.ceil(outputs / self._columns) * self._split
        return blocks, self._inner_us * (np.ceil(inputs / (self._split * _INNER)) * _INNER) + self._wave_us

    def _candidates(self, rows: Size, inputs: Size, outputs: Size, weights: tuple[Floats, Floats]) -> Floats:
        config, knee = self._config, self._config.knee
        across, wave_us = weights
        products = 1.0 * rows * inputs * outputs
        bytes_us = self._dtype_bytes / (config.memory_gbps * 1e3)
        memory = ((rows * inputs + inputs * outputs + rows * outputs) * bytes_us) ** knee
        sustained = (2e-6 * products / config.sustained_tflops * self._dtype_bytes / 2) ** _POWER
        slower = (2 * products / _WORK) ** config.fade
        partial = config.split_share * 2 * rows * outputs * 4 / (config.memory_gbps * 1e3)  # float32, out and in
        waves = np.ceil(rows / self._rows) * across / self._multiprocessors
        waves += self._whole * (np.ceil(waves) - waves)
        compute = np.maximum(waves, 1.0) * wave_us * slower
        time = ((compute**_POWER + sustained) ** (knee / _POWER) + memory) ** (1 / knee) + self._fixed_us
        time += self._parts * partial
        time *= 1e-6
        return time
