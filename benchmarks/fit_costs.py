"""Fits the analytic cost model to measurements of Vidur: `python -m benchmarks.fit_costs FOLDER`.

FOLDER holds the measurements of one device (`benchmarks/support/measurements.py` says which). Fits the constants of
`conf/hardware/*.yaml` to them, starting from those of --base, and prints the block to put there. Also prints the errors
|predicted / measured - 1|, median and 90th percentile: on the fitted rows; on held-out rows (every third token count,
size or context); and of matrix products on weight shapes and on models that the fit has not seen. About ten minutes on
one core. `gapless profile import=FOLDER` fits to the tables of aiconfigurator by the same code.

`--check hardware=NAME` fits nothing and prints the errors of the constants in that file. Seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from gapless.conf.build import load_hardware
from gapless.conf.costs import CostsConfig
from gapless.conf.errors import ConfigError
from gapless.runtime.cost.imported import rounded
from gapless.runtime.profiling.fitting import (
    errors,
    errors_of,
    errors_of_products,
    fit_all,
    fit_gemm,
    products_seconds,
)
from gapless.runtime.profiling.least_squares import Array

from .support import measurements as m
from .support.harness import Benchmark, say

FOLDS = 4


def unseen(base: CostsConfig, products: Sequence[m.MatrixProduct], part: Callable[[Any], object]) -> Array:
    """Predict the products of each part with constants fitted to the other parts."""
    parts, predicted = [part(p) for p in products], np.empty(len(products))
    for held_out in dict.fromkeys(parts):
        at = [i for i, own in enumerate(parts) if own == held_out]
        gemm = fit_gemm(
            base.gemm, [p for p, own in zip(products, parts, strict=True) if own != held_out], base.multiprocessors
        )
        predicted[at] = products_seconds(gemm, [products[i] for i in at], base.multiprocessors)
    return predicted


def main() -> int:
    bench = Benchmark(
        __doc__,
        {"folder": Path},
        check={"metavar": "hardware=NAME", "help": "only print the errors of that file's constants"},
        base={"default": "a100-80g", "metavar": "NAME", "help": "hardware that the fit starts from"},
        quick={"action": "store_true", "help": "only fit all rows, hold nothing out"},
    )
    given, tables = bench.given, bench.tables
    measured = m.read(given.folder)
    if not measured.are_any:
        print(f"{given.folder}: no measurements there; nothing is checked")
        return 0
    name = given.check.removeprefix("hardware=") if given.check else given.base
    try:
        base = load_hardware(name).costs
    except ConfigError as error:
        say(str(error))
        return 2
    if base is None:
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
