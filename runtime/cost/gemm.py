"""Time of a matrix product on a device that computes it in tiles."""

from __future__ import annotations

from ...conf.costs import GemmConfig

_SPLITS = (1, 2, 3, 4, 5, 6, 8, 10)  # of the inner dimension
_INNER = 64  # elements of the inner dimension that a tile takes at a time
_AREA = 256 * 128  # of the tile that wave_us is of
_WORK = 1e11  # FLOP of the product that the rates of tiles are of
_POWER = 6.0  # order of the norm that joins the time by waves and that at the sustained rate


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
        self._config = config
        self._multiprocessors = multiprocessors
        self._dtype_bytes = dtype_bytes
        self._kernels: list[tuple[int, int, float, float]] = []  # rows, columns, us an element of k, whole_waves
        for shape, tflops, whole in zip(config.tiles, config.tflops, config.whole_waves, strict=True):
            a, b = map(int, shape.split("x"))
            inner_us = 2 * a * b * multiprocessors / (tflops * 1e6) * dtype_bytes / 2
            for rows, columns in dict.fromkeys(((a, b), (b, a))):
                self._kernels.append((rows, columns, inner_us, whole))

    def seconds(self, rows: int, inputs: int, outputs: int) -> float:
        """Of the fastest kernel."""
        return min(self.candidates(rows, inputs, outputs))

    def candidates(self, rows: float, inputs: float, outputs: float) -> list[float]:
        """Seconds by each kernel. Plain arithmetic: numpy arrays of one shape serve as well."""
        config, slots, knee = self._config, self._multiprocessors, self._config.knee
        bytes_us = self._dtype_bytes / (config.memory_gbps * 1e3)
        memory = ((rows * inputs + inputs * outputs + rows * outputs) * bytes_us) ** knee
        partial = config.split_share * 2 * rows * outputs * 4 / (config.memory_gbps * 1e3)  # float32, out and in
        sustained = (2e-6 * rows * inputs * outputs / config.sustained_tflops * self._dtype_bytes / 2) ** _POWER
        slower = (2 * rows * inputs * outputs / _WORK) ** config.fade
        slices = [-(-inputs // (split * _INNER)) * _INNER for split in _SPLITS]
        found = []
        for tile_rows, tile_columns, inner_us, whole in self._kernels:
            down, across = -(-rows // tile_rows), -(-outputs // tile_columns)
            wave_us = config.wave_us * tile_rows * tile_columns / _AREA
            for split, length in zip(_SPLITS, slices, strict=True):
                waves = down * across * split / slots
                waves += whole * (-(-waves // 1) - waves)
                compute = _at_least(waves, 1) * (inner_us * length + wave_us) * slower
                compute = compute**_POWER + sustained
                time = (compute ** (knee / _POWER) + memory) ** (1 / knee) + config.launch_us
                if split > 1:
                    time += config.split_us + split * partial
                found.append(time * 1e-6)
        return found


def _at_least(value: float, least: float) -> float:
    return (value + least + abs(value - least)) / 2
