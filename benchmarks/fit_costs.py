"""Fits the analytic cost model to measurements: `python -m benchmarks.fit_costs FOLDER`.

FOLDER holds the measurements of one device (`benchmarks/support/measurements.py` says which). Fits the constants of
`conf/hardware/*.yaml` to them, starting from those of --base, and prints the block to put there. Also prints the errors
|predicted / measured - 1|, median and 90th percentile: on the fitted rows; on held-out rows (every third token count,
size or context); and of matrix products on weight shapes and on models that the fit has not seen. About ten minutes on
one core.

`--check hardware=NAME` fits nothing and prints the errors of the constants in that file. Seconds.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from gapless.conf.build import load_hardware, to_mapping
from gapless.conf.costs import (
    AttentionConfig,
    AttentionFamilies,
    AttentionKernels,
    CostsConfig,
    GemmConfig,
    LinkConfig,
    PointwiseConfig,
)
from gapless.conf.errors import ConfigError
from gapless.runtime.cost.attention import AttentionCost
from gapless.runtime.cost.gemm import Gemm
from gapless.runtime.cost.link import Link
from gapless.runtime.cost.pointwise import Pointwise

from .support import measurements as m
from .support.harness import Benchmark, Row, say
from .support.least_squares import Array, Kind, Space, fit


def free(text: str) -> dict[str, Kind]:
    """Return the constants that vary and how each is bounded, `NAME:KIND`; without a kind it is positive."""
    parts = [word.partition(":") for word in text.split()]
    return {name: kind or "positive" for name, _, kind in parts}  # type: ignore[misc]


GEMM = free(
    "tflops whole_waves:share fade sustained_tflops launch_us wave_us split_us split_share memory_gbps knee:above_one"
)
POINTWISE = free(" ".join(field.name for field in dataclasses.fields(PointwiseConfig)))
CHUNKS = free(
    "chunk_launch_us chunk_split_us chunk_tflops chunk_self:above_half chunk_waves:share chunk_spread:above_one "
    "chunk_copy_gbps chunk_wave_us chunk_token_ns"
)
DECODES = free(
    "decode_launch_us decode_split_us decode_wave_us decode_gbps decode_waves:share decode_spread:above_one "
    "decode_token_ns decode_tokens"
)
LINK = free("least_us ramp_us gbps knee:above_one")
SHARED = ("launch_us", "element_ns")  # constants that all row-by-row kernels share
SAMPLE_SIZE = 1200  # matrix products on which the starts of a fit are compared
STARTS = 4
FOLDS = 4


@dataclasses.dataclass(frozen=True)
class Measured:
    """All measurements of a device; attention by the library that computed it, messages by file."""

    products: list[m.MatrixProduct]
    rows: list[m.RowKernel]
    chunks: dict[AttentionKernels, list[m.ChunkAttention]]
    decodes: dict[AttentionKernels, list[m.DecodeAttention]]
    all_reduce: dict[str, list[m.Message]]
    node: dict[str, list[m.Message]]
    network: dict[str, list[m.Message]]

    @classmethod
    def of(cls, folder: Path) -> Measured:
        products, rows = [], []
        for model in m.models(folder):
            of_model = m.read_linear(folder, model)
            products += of_model[0]
            rows += of_model[1]
        chunks, decodes, copies = m.read_attention(folder)
        fi_chunks, fi_decodes = m.read_flashinfer(folder)
        return cls(
            products,
            rows + copies,
            _measured(flash_attention=chunks, flashinfer=fi_chunks),
            _measured(flash_attention=decodes, flashinfer=fi_decodes),
            m.read_all_reduce(folder),
            m.read_send(folder, between_nodes=False),
            m.read_send(folder, between_nodes=True),
        )


def _measured(**by_kernels: Any) -> Any:
    """Return the libraries of which there are measurements."""
    return {kernels: rows for kernels, rows in by_kernels.items() if rows}


def products_seconds(config: GemmConfig, products: Sequence[m.MatrixProduct], multiprocessors: int) -> Array:
    rows, inputs, outputs = (np.array([p[at] for p in products], float) for at in (4, 5, 6))
    return Gemm(config, multiprocessors, m.ELEMENT).seconds(rows, inputs, outputs)


def rows_seconds(config: PointwiseConfig, rows: Sequence[m.RowKernel]) -> Array:
    def one(row: m.RowKernel) -> float:
        return Pointwise(config, [(row.width, row.moved, getattr(config, f"{row.operator}_gbps"))]).seconds(row.rows)

    return np.array([one(row) for row in rows])


def chunks_seconds(config: AttentionConfig, chunks: Sequence[m.ChunkAttention], multiprocessors: int) -> Array:
    by_heads = _attention(config, chunks, multiprocessors)
    return np.array([by_heads[c[:3]].chunk(c.length, c.prefix) for c in chunks])


def decodes_seconds(config: AttentionConfig, decodes: Sequence[m.DecodeAttention], multiprocessors: int) -> Array:
    by_heads = _attention(config, decodes, multiprocessors)
    return np.array([by_heads[d[:3]].decodes(d.requests, d.requests * d.context) for d in decodes])


def _attention(
    config: AttentionConfig, measured: Iterable[m.ChunkAttention | m.DecodeAttention], multiprocessors: int
) -> dict[tuple[int, int, int], AttentionCost]:
    return {
        heads: AttentionCost(config, *heads, multiprocessors, m.ELEMENT) for heads in {each[:3] for each in measured}
    }


def messages_seconds(config: LinkConfig, messages: Sequence[m.Message]) -> Array:
    """Return the predicted seconds of messages. In an all-reduce each of n ranks sends 2 (n - 1) / n of the bytes."""
    link: Any = Link(config)
    return np.asarray(link.seconds(np.array([s * (2 * (n - 1) / n if n > 1 else 1) for n, s, _ in messages])))


def fit_all(measured: Measured, base: CostsConfig) -> CostsConfig:
    """Fit all constants that have measurements; the others stay as in `base`."""
    found: dict[str, Any] = {}
    if measured.products:
        found["gemm"] = fit_gemm(base.gemm, measured.products, base.multiprocessors)
    if measured.rows:
        names = {*SHARED, *(f"{row.operator}_gbps" for row in measured.rows)}
        chosen = {name: kind for name, kind in POINTWISE.items() if name in names}
        found["pointwise"] = _fit(base.pointwise, chosen, measured.rows, rows_seconds)
    found["attention"] = fit_attention(base, measured)
    for name in ("all_reduce", "node", "network"):
        if files := getattr(measured, name):
            found[name] = fit_link(getattr(base, name), files, name)
    return dataclasses.replace(base, **found)


def fit_attention(base: CostsConfig, measured: Measured) -> AttentionFamilies:
    """Fit the constants of the libraries that were measured."""
    cores, found = base.multiprocessors, base.attention
    for kernels in measured.chunks.keys() | measured.decodes.keys():
        if kernels not in found.known:
            continue
        config, chunks, decodes = found.of(kernels), measured.chunks.get(kernels), measured.decodes.get(kernels)
        if chunks:
            # FlashInfer's kernels were timed alone, FlashAttention's with the copies of what they read and write.
            chosen = {
                name: kind for name, kind in CHUNKS.items() if kernels != "flashinfer" or name != "chunk_copy_gbps"
            }
            config = _fit(config, chosen, chunks, lambda c, x: chunks_seconds(c, x, cores))
        if decodes:
            config = _fit(config, DECODES, decodes, lambda c, x: decodes_seconds(c, x, cores))
        found = dataclasses.replace(found, **{kernels: config})
    return found


def fit_gemm(base: GemmConfig, products: Sequence[m.MatrixProduct], multiprocessors: int) -> GemmConfig:
    """Fit a sample from several starts, then all products from the best: the choice of kernels makes many local optima.

    Each hidden size has the same weight, however many models have it.
    """
    space, random = Space(base, GEMM), np.random.default_rng(0)
    sample = [products[i] for i in random.permutation(len(products))[:SAMPLE_SIZE]]
    starts = [base]
    for _ in range(STARTS - 1):
        starts.append(space.config(space.vector(base) + random.normal(0, 0.3, len(space.vector(base)))))

    def fitted(start: GemmConfig, to: Sequence[m.MatrixProduct], steps: int) -> tuple[GemmConfig, float]:
        count = Counter(p.hidden for p in to)
        weights = np.array([1 / count[p.hidden] for p in to])
        predict = functools.partial(products_seconds, products=to, multiprocessors=multiprocessors)
        return fit(space, start, predict, _seconds(to), weights=weights, steps=steps)

    best, _ = min((fitted(start, sample, 25) for start in starts), key=lambda found: found[1])
    return fitted(best, products, 10)[0]


def fit_link(base: LinkConfig, files: dict[str, list[m.Message]], name: str) -> LinkConfig:
    """Fit a link to the files that `_kept` names, each with the same weight."""
    kept = _kept(files, name)
    messages = [message for file in kept for message in files[file]]
    weights = np.array([1 / len(files[file]) for file in kept for _ in files[file]])
    return _fit(base, LINK, messages, messages_seconds, weights)


def _kept(files: dict[str, list[m.Message]], name: str) -> list[str]:
    """Return the files that a link is fitted to: for sends those by hidden size, if there are any.

    The other file of sends measures another network between nodes, and kernels without their launch within a node.
    """
    return [file for file in files if name == "all_reduce" or "hidden_size" in file] or list(files)


def _fit(
    base: Any,
    free: dict[str, Kind],
    measured: Sequence[Any],
    predict: Callable[[Any, Sequence[Any]], Array],
    weights: Array | None = None,
) -> Any:
    space = Space(base, free)
    return fit(space, base, lambda config: predict(config, measured), _seconds(measured), weights=weights)[0]


def _seconds(measured: Sequence[Any]) -> Array:
    return np.array([each.seconds for each in measured])


def errors(name: str, predicted: Array, measured: Sequence[Any]) -> list[Row]:
    """Return a row of errors, none without measurements."""
    if not len(measured):
        return []
    off = np.abs(predicted / _seconds(measured) - 1)
    shares = {"median_share": float(np.median(off)), "p90_share": float(np.percentile(off, 90))}
    return [{"of": name, "rows": len(measured), **shares}]


def errors_by(name: Callable[[Any], str], predicted: Array, measured: Sequence[Any]) -> list[Row]:
    """Return a row of errors for each group of measurements with the same name, in order of first appearance."""
    groups: dict[str, list[int]] = {}
    for place, each in enumerate(measured):
        groups.setdefault(name(each), []).append(place)
    return [row for key, at in groups.items() for row in errors(key, predicted[at], [measured[i] for i in at])]


def errors_of(costs: CostsConfig, measured: Measured) -> list[Row]:
    """Return the errors of `costs`."""
    cores, rows = costs.multiprocessors, []
    if products := measured.products:
        predicted = products_seconds(costs.gemm, products, cores)
        rows += _errors_of_products(predicted, products)
        order = sorted(range(len(products)), key=lambda i: products[i].rows)
        rows += errors_by(_band, predicted[order], [products[i] for i in order])
        rows += errors("matrix products", predicted, products)
    if kernels := measured.rows:
        rows += errors_by(lambda row: f"row by row, {row.operator}", rows_seconds(costs.pointwise, kernels), kernels)
    for library in costs.attention.known:
        config = costs.attention.of(library)
        if chunks := measured.chunks.get(library):
            rows += errors(f"{library}, chunks", chunks_seconds(config, chunks, cores), chunks)
        if decodes := measured.decodes.get(library):
            rows += errors(f"{library}, decodes", decodes_seconds(config, decodes, cores), decodes)
    for name, word in (("all_reduce", "all-reduce"), ("node", "send in a node"), ("network", "send between nodes")):
        files, link = getattr(measured, name), getattr(costs, name)
        for file, messages in files.items():
            rows += errors(f"{word}, {file}", messages_seconds(link, messages), messages)
            if file not in _kept(files, name):
                own = _fit(link, LINK, messages[::2], messages_seconds)
                text = f"  constants of its own: {own.least_us:.0f} us, {own.gbps:.1f} GB/s"
                rows += errors(text, messages_seconds(own, messages[1::2]), messages[1::2])
    return rows


def _errors_of_products(predicted: Array, products: Sequence[m.MatrixProduct]) -> list[Row]:
    names = (lambda p: f"{p.model}", lambda p: f"  {p.operator}", lambda p: f"  tp {p.tp}")
    return [row for name in names for row in errors_by(name, predicted, products)]


def _band(product: m.MatrixProduct) -> str:
    bounds = (8, 64, 128, 256, 512, 1024, 2048)
    most = next((bound for bound in bounds if product.rows <= bound), None)
    return f"  {bounds[-1]}+ rows" if most is None else f"  up to {most} rows"


def split_rows(measured: Measured) -> tuple[Measured, Measured]:
    """Split off every third token count, size or context; returns the kept and the held-out measurements."""

    def split(each: Sequence[Any], size: Callable[[Any], object]) -> tuple[list[Any], list[Any]]:
        out = set(sorted({size(one) for one in each})[1::3])  # type: ignore[type-var]
        return [one for one in each if size(one) not in out], [one for one in each if size(one) in out]

    parts: dict[str, tuple[Any, Any]] = {
        "products": split(measured.products, lambda p: p.rows),
        "rows": split(measured.rows, lambda r: r.rows),
    }
    sizes: dict[str, Callable[[Any], object]] = dict.fromkeys(("all_reduce", "node", "network"), lambda x: x.size)
    sizes |= {"chunks": lambda c: c.prefix or c.length, "decodes": lambda d: (d.requests, d.context)}
    for name, size in sizes.items():
        halves = {file: split(rows, size) for file, rows in getattr(measured, name).items()}
        parts[name] = ({f: kept for f, (kept, _) in halves.items()}, {f: out for f, (_, out) in halves.items()})
    return (
        Measured(**{name: kept for name, (kept, _) in parts.items()}),
        Measured(**{name: out for name, (_, out) in parts.items()}),
    )


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


def block(costs: CostsConfig) -> str:
    """Return the constants as YAML, rounded to four digits."""

    def short(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: short(each) for key, each in value.items()}
        if isinstance(value, list):
            return [short(each) for each in value]
        return float(f"{value:.4g}") if isinstance(value, float) else value

    return yaml.safe_dump({"costs": short(to_mapping(costs))}, sort_keys=False, default_flow_style=None, width=110)


def main() -> int:
    bench = Benchmark(
        __doc__,
        {"folder": Path},
        check={"metavar": "hardware=NAME", "help": "only print the errors of that file's constants"},
        base={"default": "a100-80g", "metavar": "NAME", "help": "hardware that the fit starts from"},
        quick={"action": "store_true", "help": "only fit all rows, hold nothing out"},
    )
    given, tables = bench.given, bench.tables
    measured = Measured.of(given.folder)
    if not any(getattr(measured, field.name) for field in dataclasses.fields(measured)):
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
        kept, out = split_rows(measured)
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
                rows = _errors_of_products(predicted, products) + errors("matrix products", predicted, products)
                tables[f"matrix products of each {what}, after a fit to the others alone"] = rows
    print(block(fitted), end="")
    return bench.end()


if __name__ == "__main__":
    sys.exit(main())
