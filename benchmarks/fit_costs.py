"""Fits the analytic cost model to measured operators: `python -m benchmarks.fit_costs FOLDER`.

FOLDER contains the measurements of one device: Vidur's (see `benchmarks/support/measurements.py`) or aiconfigurator's
tables (see `published.py`). Fits the constants of `conf/hardware/*.yaml` to them, starting from those of --base, and
prints the resulting YAML block. Also prints the median and 90th percentile of the errors |predicted / measured - 1|: on
the fitted rows; on held-out rows (every third token count, size or context); and of GEMMs on held-out weight shapes and
models. About ten minutes on one core.

`--check hardware=NAME` fits nothing and prints the errors of the constants in that file. Seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from gapless.conf.build import load_hardware, to_mapping
from gapless.conf.costs import CostsConfig
from gapless.conf.errors import ConfigError
from gapless.conf.schema import HardwareConfig

from .support import measurements as m
from .support.fitting import (
    errors,
    errors_of,
    errors_of_products,
    fit_all,
    fit_gemm,
    products_seconds,
)
from .support.harness import Benchmark, say
from .support.least_squares import Array
from .support.operator_tables import OperatorTables
from .support.published import read_published

FOLDS = 4


def read(folder: Path, hardware: HardwareConfig) -> OperatorTables:
    """Read Vidur's measurements of a device, else aiconfigurator's tables."""
    measured = m.read(folder)
    return measured if measured.are_any else read_published(folder, hardware.attention, hardware.name.partition("-")[0])


def unseen(base: CostsConfig, products: Sequence[m.MatrixProduct], part: Callable[[Any], object]) -> Array:
    """Predict the GEMMs of each part with constants fitted to the other parts (cross-validation)."""
    parts, predicted = [part(p) for p in products], np.empty(len(products))
    for held_out in dict.fromkeys(parts):
        at = [i for i, own in enumerate(parts) if own == held_out]
        gemm = fit_gemm(
            base.gemm, [p for p, own in zip(products, parts, strict=True) if own != held_out], base.multiprocessors
        )
        predicted[at] = products_seconds(gemm, [products[i] for i in at], base.multiprocessors)
    return predicted


def rounded(costs: CostsConfig) -> object:
    """Return the constants as plain data, rounded to four digits, without unknown ones."""

    def short(value: object) -> object:
        if isinstance(value, dict):
            return {key: short(each) for key, each in value.items() if each is not None}
        if isinstance(value, list):
            return [short(each) for each in value]
        return float(f"{value:.4g}") if isinstance(value, float) else value

    return short(to_mapping(costs))


def main() -> int:
    bench = Benchmark(
        __doc__,
        {"folder": Path},
        check={"metavar": "hardware=NAME", "help": "only print the errors of that file's constants"},
        base={"default": "a100-80g", "metavar": "NAME", "help": "starting point of the fit"},
        quick={"action": "store_true", "help": "only fit all rows, without held-out errors"},
    )
    given, tables = bench.given, bench.tables
    name = given.check.removeprefix("hardware=") if given.check else given.base
    try:
        hardware = load_hardware(name)
        measured = read(given.folder, hardware)
    except ConfigError as error:
        say(str(error))
        return 2
    if (base := hardware.costs) is None:
        say(f"hardware={name}: has no constants")
        return 2
    if given.check:
        tables[f"hardware={name} against all measurements of {given.folder.name}"] = errors_of(base, measured)
        return bench.end()
    fitted = fit_all(measured, base)
    tables["on the rows that were fitted"] = errors_of(fitted, measured)
    products = measured.products
    if not given.quick:
        kept, out = measured.split()
        tables["on every third row, left out of the fit"] = errors_of(fit_all(kept, fitted), out)
        shapes = sorted({(p.inputs, p.outputs) for p in products})
        order = np.random.default_rng(0).permutation(len(shapes)).tolist()
        quarter = {shapes[i]: at % FOLDS for at, i in enumerate(order)}
        for what, part in (
            ("quarter of the weights' shapes", lambda p: quarter[p.inputs, p.outputs]),
            ("model", lambda p: p.model),
        ):
            if len({part(p) for p in products}) > 1:
                predicted = unseen(fitted, products, part)
                rows = errors_of_products(predicted, products) + errors("matrix products", predicted, products)
                tables[f"matrix products of each {what}, after a fit to the others alone"] = rows
    text = yaml.safe_dump({"costs": rounded(fitted)}, sort_keys=False, default_flow_style=None, width=110)
    print(text, end="")
    return bench.end()


if __name__ == "__main__":
    sys.exit(main())
