"""Time of a matrix product on a device that computes it in tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ...conf.costs import GemmConfig

Floats = npt.NDArray[np.float64]

_SPLITS = (1, 2, 3, 4, 5, 6, 8, 10)  # of the inner dimension
_INNER = 64  # elements of the inner dimension that a tile takes at a time
_AREA = 256 * 128  # of the tile that wave_us is of
_WORK = 1e11  # FLOP of the product that the rates of tiles are of
_POWER = 6  # order of the norm that joins the time by waves and that at the sustained rate
_AT_ONCE = 16  # numbers of rows that are costed together: little more work for numpy than one


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
        tiles = [
            (*sides, inner, whole)
            for shape, inner, whole in self._tiles(config, multiprocessors, dtype_bytes)
            for sides in dict.fromkeys((shape, shape[::-1]))
        ]
        self._config = config
        self._multiprocessors = multiprocessors
        self._dtype_bytes = dtype_bytes
        # By tile, [tiles, 1]: its rows and columns, us an element of k, whole_waves.
        self._rows, self._columns, self._inner_us, self._whole = np.array(tiles, np.float64).T[:, :, None]
        self._wave_us = config.wave_us * self._rows * self._columns / _AREA
        self._splits = np.array(_SPLITS, np.float64)
        self._fixed_us = config.launch_us + np.where(self._splits > 1, config.split_us, 0.0)
        self._parts = np.where(self._splits > 1, self._splits, 0.0)  # partial results

    @staticmethod
    def _tiles(
        config: GemmConfig, multiprocessors: int, dtype_bytes: int
    ) -> Iterator[tuple[tuple[int, int], float, float]]:
        """Shapes, us an element of the inner dimension, whole_waves."""
        for text, tflops, whole in zip(config.tiles, config.tflops, config.whole_waves, strict=True):
            rows, columns = map(int, text.split("x"))
            yield (rows, columns), 2 * rows * columns * multiprocessors / (tflops * 1e6) * dtype_bytes / 2, whole

    def seconds(self, rows: Floats, inputs: Floats, outputs: Floats) -> Floats:
        """Of the fastest kernel, for sizes that broadcast to [...]."""
        config, knee = self._config, self._config.knee
        by_tile = tuple(size[..., None, None] for size in (rows, inputs, outputs))
        compute = self._compute_us(*by_tile).min(axis=-2)  # of the fastest tile, [..., splits]
        rows, inputs, outputs = (size[..., None] for size in (rows, inputs, outputs))
        products = rows * inputs * outputs
        bytes_us = self._dtype_bytes / (config.memory_gbps * 1e3)
        memory = ((rows * inputs + inputs * outputs + rows * outputs) * bytes_us) ** knee
        compute *= (2 * products / _WORK) ** config.fade
        sustained = (2e-6 * products / config.sustained_tflops * self._dtype_bytes / 2) ** _POWER
        partial = config.split_share * 2 * rows * outputs * 4 / (config.memory_gbps * 1e3)  # float32, out and in
        time = ((compute**_POWER + sustained) ** (knee / _POWER) + memory) ** (1 / knee)
        found: Floats = (time + self._fixed_us + self._parts * partial).min(axis=-1) * 1e-6
        return found

    def _compute_us(self, rows: Floats, inputs: Floats, outputs: Floats) -> Floats:
        """By tile and split, [..., tiles, splits], of sizes [..., 1, 1]."""
        waves = np.ceil(rows / self._rows) * np.ceil(outputs / self._columns) / self._multiprocessors * self._splits
        waves += self._whole * (np.ceil(waves) - waves)
        inner = np.ceil(inputs / (self._splits * _INNER)) * _INNER
        found: Floats = np.maximum(waves, 1.0) * (self._inner_us * inner + self._wave_us)
        return found


class Products:
    """Times of products of the same rows with several weights, of sizes (inputs, outputs)."""

    def __init__(self, gemm: Gemm, weights: Sequence[tuple[int, int]]) -> None:
        self._gemm = gemm
        self._inputs, self._outputs = np.array(weights, np.float64).T
        self._known: dict[int, list[float]] = {}

    def seconds(self, rows: int) -> list[float]:
        """By weight, of the fastest kernel each."""
        known = self._known.get(rows)
        if known is None:
            first = rows - rows % _AT_ONCE
            block = np.arange(first, first + _AT_ONCE, dtype=np.float64)
            times = self._gemm.seconds(block[:, None], self._inputs, self._outputs)
            self._known.update(enumerate(times.tolist(), first))
            known = self._known[rows]
        return known
