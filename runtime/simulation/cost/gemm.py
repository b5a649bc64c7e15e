"""Predicts the time of a GEMM on a device that computes it in tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ....conf.costs import GemmConfig
from ....kernels.weight_format import WeightFormat

Floats = npt.NDArray[np.float64]

_SPLITS = (1, 2, 3, 4, 5, 6, 8, 10)  # split-K factors
_INNER_STEP = 64  # elements of the inner dimension that a tile reads at a time
_REFERENCE_AREA = 256 * 128  # elements of the tile for which the config gives `wave_us`
_REFERENCE_FLOP = 1e11  # FLOP of the GEMM for which the config gives the rates of tiles
_POWER_NORM_ORDER = 6  # of the p-norm that combines the time by waves with the time at the sustained rate
_BLOCK = 128  # weights per scale in block-scaled FP8
_ROWS_AT_ONCE = 16  # row counts predicted by one numpy call: hardly slower than one


class Gemm:
    """Predicts the time of [rows, inputs] x [inputs, outputs].

    A library has kernels of several tile shapes, which may use split-K. The model assumes that the library chooses the
    fastest. A kernel computes whole tiles in waves of one tile per multiprocessor. A partial last wave costs a part of
    a full one. Long kernels lower the device's clock, and its power limit bounds the sustained rate.

    The time to read and write the matrices once is a second bound. A p-norm combines it with the compute time, since
    both matter near the roofline's knee.

    Args:
        multiprocessors: number of multiprocessors of the device.
        dtype_bytes: bytes of an element. The config's rates are for 2 bytes; time grows in proportion.
        weights: weight format; None: not quantized. FP8 weights, and INT8 weights with INT8 activations, are
            multiplied at the config's rate for them. Without such a rate, and for other formats, kernels dequantize
            weights to `dtype_bytes` as they read them.
        fuses_casts: the preceding kernel quantizes the input, unless scales are per block.
        byte_tflops: sustained rate of large FP8 or INT8 GEMMs; 0: the config's.
    """

    def __init__(
        self,
        config: GemmConfig,
        multiprocessors: int,
        dtype_bytes: int,
        weights: WeightFormat | None = None,
        *,
        fuses_casts: bool = False,
        byte_tflops: float = 0.0,
    ) -> None:
        rate, by_block = None, weights is not None and weights.group == _BLOCK
        if weights is not None and weights.bits == 8 and (weights.int8_activations or weights.is_float):
            block = config.fp8_block_rate if by_block else None
            rate = (block or config.fp8_rate) if weights.is_float else config.int8_rate
        self._cast_us, self._cast_us_of_element = 0.0, 0.0  # to quantize the input
        if rate is not None and config.cast_gigabytes_per_s is not None and (by_block or not fuses_casts):
            self._cast_us, self._cast_us_of_element = (
                config.cast_us,
                (dtype_bytes + 1) / (config.cast_gigabytes_per_s * 1e3),
            )
        self._slowness = dtype_bytes / 2 if rate is None else 1 / rate  # relative to elements of 2 bytes
        self._sustained_us = 2e-6 / config.sustained_tflops * self._slowness  # per multiply-add, power-limited
        if byte_tflops and rate is not None:
            self._sustained_us = 2e-6 / byte_tflops
        tiles = [
            (*sides, inner, whole)
            for shape, inner, whole in self._tiles(config, multiprocessors)
            for sides in dict.fromkeys((shape, shape[::-1]))
        ]
        self._config = config
        self._multiprocessors = multiprocessors
        self._input_bytes = dtype_bytes if rate is None else 1
        self._weight_bytes = dtype_bytes if weights is None else weights.bytes_per_element
        self._output_bytes = dtype_bytes
        # Each [tiles, 1]: a tile's rows and columns, microseconds per element of the inner dimension, `whole_waves`.
        self._rows, self._columns, self._inner_us, self._whole_waves = np.array(tiles, np.float64).T[:, :, None]
        self._wave_us = config.wave_us * self._rows * self._columns / _REFERENCE_AREA
        self.tile_rows = self._rows[:, 0]  # [tiles]
        self._splits = np.array(_SPLITS, np.float64)
        self._overhead_us = config.launch_us + np.where(self._splits > 1, config.split_us, 0.0)
        self._num_partial = np.where(self._splits > 1, self._splits, 0.0)  # partial results to be summed

    def _tiles(self, config: GemmConfig, multiprocessors: int) -> Iterator[tuple[tuple[int, int], float, float]]:
        """Yield each tile's shape, microseconds per element of the inner dimension, and `whole_waves`."""
        for text, tflops, whole in zip(config.tiles, config.tflops, config.whole_waves, strict=True):
            rows, columns = map(int, text.split("x"))
            yield (rows, columns), 2 * rows * columns * multiprocessors / (tflops * 1e6) * self._slowness, whole

    @property
    def tflops(self) -> float:
        """The sustained rate of large GEMMs."""
        return 2e-6 / self._sustained_us

    def seconds(self, rows: Floats, inputs: Floats, outputs: Floats) -> Floats:
        """Return the seconds of the fastest kernel, [...], for sizes that broadcast to [...]."""
        config = self._config
        row_tiles = np.ceil(rows[..., None, None] / self._rows)
        by_tile = self._compute_us(row_tiles, inputs[..., None, None], outputs[..., None, None], self._splits)
        compute = by_tile.min(axis=-2)  # of the fastest tile, [..., splits]
        rows, inputs, outputs = (size[..., None] for size in (rows, inputs, outputs))
        moved = self._bytes(rows * inputs, inputs * outputs, rows * outputs)
        time = self._joined_us(compute, rows * inputs * outputs, moved)
        partial = (
            config.split_share * 2 * rows * outputs * 4 / (config.memory_gigabytes_per_s * 1e3)
        )  # float32, written and read
        found: Floats = (time + self._overhead_us + self._num_partial * partial).min(axis=-1)
        return (found + self._cast(rows[..., 0], inputs[..., 0])) * 1e-6

    def grouped_seconds(self, rows: Floats, row_tiles: Floats, weights: Floats, inputs: int, outputs: int) -> Floats:
        """Return the seconds, [...], of one grouped GEMM: groups of rows, each with a weight of its own.

        The tiles of all groups share the waves. Each weight is read once. There is no split-K.

        Args:
            rows: total of all groups, [...].
            row_tiles: tiles that cover the rows of all groups, for each of `tile_rows`: [..., tiles].
            weights: number of weights with rows, [...].
            inputs: input features of each weight.
            outputs: output features of each weight.
        """
        sizes = np.array(float(inputs)), np.array(float(outputs))
        compute = self._compute_us(row_tiles[..., None], *sizes, np.ones(1)).min(axis=(-2, -1))  # of the fastest tile
        moved = self._bytes(rows * inputs, weights * inputs * outputs, rows * outputs)
        rate = self._config.grouped_rate
        found: Floats = self._joined_us(compute / rate, rows * inputs * outputs / rate, moved) + self._config.launch_us
        return (found + self._cast(rows, sizes[0])) * 1e-6

    def _cast(self, rows: Floats, inputs: Floats) -> Floats:
        """Return the microseconds to quantize a GEMM's input; 0 if that takes no kernel of its own."""
        return self._cast_us + rows * inputs * self._cast_us_of_element

    def _compute_us(self, row_tiles: Floats, inputs: Floats, outputs: Floats, splits: Floats) -> Floats:
        """Return the microseconds by tile and split, [..., tiles, splits], of the tiles that cover rows and outputs."""
        waves = row_tiles * np.ceil(outputs / self._columns) / self._multiprocessors * splits
        waves += self._whole_waves * (np.ceil(waves) - waves)
        inner = np.ceil(inputs / (splits * _INNER_STEP)) * _INNER_STEP
        found: Floats = np.maximum(waves, 1.0) * (self._inner_us * inner + self._wave_us)
        return found

    def _bytes(self, inputs: Floats, weights: Floats, outputs: Floats) -> Floats:
        """Return the bytes of that many input, weight and output elements."""
        return inputs * self._input_bytes + weights * self._weight_bytes + outputs * self._output_bytes

    def _joined_us(self, compute: Floats, products: Floats, moved: Floats) -> Floats:
        """Combine the compute, power and memory bounds, and return microseconds.

        Args:
            compute: microseconds of the tiles, at the clock of the reference product.
            products: multiply-adds.
            moved: bytes read and written.
        """
        config, knee, order = self._config, self._config.knee, _POWER_NORM_ORDER
        memory = (moved / (config.memory_gigabytes_per_s * 1e3)) ** knee
        slowed = compute * (2 * products / _REFERENCE_FLOP) ** config.fade
        sustained = (products * self._sustained_us) ** order
        found: Floats = ((slowed**order + sustained) ** (knee / order) + memory) ** (1 / knee)
        return found


class Products:
    """Predicts the times of GEMMs of the same rows with each of several weights. Times are cached by rows.

    Args:
        weights: the (inputs, outputs) of each weight.
    """

    def __init__(self, gemm: Gemm, weights: Sequence[tuple[int, int]]) -> None:
        self._gemm = gemm
        self._inputs, self._outputs = np.array(weights, np.float64).T
        self._by_rows: dict[int, list[float]] = {}

    def seconds(self, rows: int) -> list[float]:
        """Return the seconds of each weight's GEMM with `rows` rows."""
        known = self._by_rows.get(rows)
        if known is None:
            first = rows - rows % _ROWS_AT_ONCE
            block = np.arange(first, first + _ROWS_AT_ONCE, dtype=np.float64)
            times = self._gemm.seconds(block[:, None], self._inputs, self._outputs)
            self._by_rows.update(enumerate(times.tolist(), first))
            known = self._by_rows[rows]
        return known
