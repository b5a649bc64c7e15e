"""Fits a device's cost constants to measured operator times, and reports their errors."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from gapless.conf.costs import (
    AttentionConfig,
    AttentionFamilies,
    CostsConfig,
    GemmConfig,
    LinkConfig,
    PointwiseConfig,
)
from gapless.conf.experts import ExpertsConfig
from gapless.kernels.weight_format import WeightFormat
from gapless.runtime.simulation.cost.attention import AttentionCost
from gapless.runtime.simulation.cost.experts import ExpertProducts, Routing
from gapless.runtime.simulation.cost.gemm import Gemm
from gapless.runtime.simulation.cost.link import Link
from gapless.runtime.simulation.cost.pointwise import Pointwise

from .least_squares import Array, FreeConstants, Kind, fit
from .operator_tables import (
    ELEMENT,
    ChunkKernel,
    DecodeKernel,
    ExpertLayer,
    MatrixProduct,
    Message,
    OperatorTables,
    RowKernel,
)

Row = dict[str, Any]
FORMATS = {  # weight formats with a GEMM rate of their own
    "fp8_rate": WeightFormat(8, 1 << 30, is_float=True),
    "fp8_block_rate": WeightFormat(8, 128, is_float=True),
}


def free(text: str) -> dict[str, Kind]:
    """Parse the free constants and their bounds, `NAME:KIND`; the default kind is positive."""
    parts = [word.partition(":") for word in text.split()]
    return {name: kind or "positive" for name, _, kind in parts}  # type: ignore[misc]


GEMM = free(
    "tflops whole_waves:share fade sustained_tflops launch_us wave_us split_us split_share memory_gigabytes_per_s "
    "knee:above_one"
)
POINTWISE = free(" ".join(field.name for field in fields(PointwiseConfig)))
CHUNKS = free(
    "chunk_launch_us chunk_split_us chunk_tflops chunk_self:above_half chunk_waves:share chunk_spread:above_one "
    "chunk_copy_gigabytes_per_s chunk_wave_us chunk_token_ns"
)
DECODES = free(
    "decode_launch_us decode_split_us decode_wave_us decode_gigabytes_per_s decode_waves:share decode_spread:above_one "
    "decode_token_ns decode_tokens"
)
LINK = free("least_us ramp_us gigabytes_per_s knee:above_one")
SHARED = ("launch_us", "element_ns")  # constants that all row-wise kernels share
SAMPLE_SIZE = 1200  # GEMMs on which the starting points of a fit are compared
STARTS = 4
LINKS = {
    "all_reduce": "all-reduce",
    "graph_all_reduce": "all-reduce in a graph",
    "node": "send in a node",
    "network": "send between nodes",
}


def products_seconds(
    config: GemmConfig, products: Sequence[MatrixProduct], multiprocessors: int, weights: WeightFormat | None = None
) -> Array:
    """Predict the seconds of GEMMs."""
    rows, inputs, outputs = (np.array([p[at] for p in products], float) for at in (4, 5, 6))
    return Gemm(config, multiprocessors, ELEMENT, weights).seconds(rows, inputs, outputs)


def rows_seconds(config: PointwiseConfig, rows: Sequence[RowKernel]) -> Array:
    """Predict the seconds of row-wise kernels."""

    def one(row: RowKernel) -> float:
        return Pointwise(config, [(row.width, row.moved, getattr(config, f"{row.operator}_gigabytes_per_s"))]).seconds(
            row.rows
        )

    return np.array([one(row) for row in rows])


def chunks_seconds(config: AttentionConfig, chunks: Sequence[ChunkKernel], multiprocessors: int) -> Array:
    """Predict the seconds of chunk attention."""
    by_heads = _attention(config, chunks, multiprocessors)

    def one(c: ChunkKernel) -> float:
        source = by_heads[c[:3]]
        return source.chunk(c.length, c.prefix) if c.prompts == 1 else source.chunks([(c.length, c.prefix)] * c.prompts)

    return np.array([one(each) for each in chunks])


def decodes_seconds(config: AttentionConfig, decodes: Sequence[DecodeKernel], multiprocessors: int) -> Array:
    """Predict the seconds of decode attention."""
    by_heads = _attention(config, decodes, multiprocessors)
    return np.array([by_heads[d[:3]].decodes(d.requests, d.requests * d.context) for d in decodes])


def experts_seconds(costs: CostsConfig, layers: Sequence[ExpertLayer]) -> Array:
    """Predict the seconds of MoE layers, with activation and the sum of expert outputs."""
    gemm, rates = Gemm(costs.gemm, costs.multiprocessors, ELEMENT), costs.pointwise

    @functools.cache
    def source(hidden: int, width: int, experts: int, picked: int) -> tuple[ExpertProducts, Pointwise]:
        routing = Routing(ExpertsConfig(num_experts=experts, experts_per_token=picked))
        kernels = (
            (2 * width, picked * 3 * width * ELEMENT, rates.activation_gigabytes_per_s),
            (0, (picked + 1) * hidden * ELEMENT, rates.add_gigabytes_per_s),
        )
        return ExpertProducts(gemm, routing, (hidden, 2 * width), (width, hidden)), Pointwise(rates, kernels)

    def one(layer: ExpertLayer) -> float:
        products, others = source(*layer[:4])
        return sum(products.seconds(layer.rows)) + others.seconds(layer.rows)

    return np.array([one(layer) for layer in layers])


def _attention(
    config: AttentionConfig, measured: Iterable[ChunkKernel | DecodeKernel], multiprocessors: int
) -> dict[tuple[int, int, int], AttentionCost]:
    return {heads: AttentionCost(config, *heads, multiprocessors, ELEMENT) for heads in {each[:3] for each in measured}}


def messages_seconds(config: LinkConfig, messages: Sequence[Message]) -> Array:
    """Return the predicted seconds of messages. In an all-reduce each of n ranks sends 2 (n - 1) / n of the bytes."""
    link: Any = Link(config)
    return np.asarray(link.seconds(np.array([s * (2 * (n - 1) / n if n > 1 else 1) for n, s, _ in messages])))


def fit_all(measured: OperatorTables, base: CostsConfig) -> CostsConfig:
    """Fit all constants that have measurements; the others stay as in `base`."""
    found: dict[str, Any] = {}
    if measured.products:
        found["gemm"] = fit_gemm(base.gemm, measured.products, base.multiprocessors)
    if measured.rows:
        names = {*SHARED, *(f"{row.operator}_gigabytes_per_s" for row in measured.rows)}
        chosen = {name: kind for name, kind in POINTWISE.items() if name in names}
        found["pointwise"] = _fit(base.pointwise, chosen, measured.rows, rows_seconds)
    found["attention"] = fit_attention(base, measured)
    for name in LINKS:
        if files := getattr(measured, name):
            found[name] = fit_link(getattr(base, name) or base.all_reduce, files, name)
    gemm = found.get("gemm", base.gemm)
    for name, products in measured.quantized.items():
        start = replace(gemm, **{name: getattr(gemm, name) or gemm.fp8_rate or 2.0})
        start = replace(
            start,
            cast_us=start.cast_us or 1.0,
            cast_gigabytes_per_s=start.cast_gigabytes_per_s or gemm.memory_gigabytes_per_s,
        )
        predict = functools.partial(products_seconds, multiprocessors=base.multiprocessors, weights=FORMATS[name])
        chosen = free(f"{name} cast_us cast_gigabytes_per_s" if name == "fp8_rate" else name)
        gemm = found["gemm"] = _fit(start, chosen, products, predict)
    if measured.experts:
        costs = replace(base, **found)
        found["gemm"] = _fit(
            costs.gemm,
            free("grouped_rate"),
            measured.experts,
            lambda config, layers: experts_seconds(replace(costs, gemm=config), layers),
        )
    return replace(base, **found)


def fit_attention(base: CostsConfig, measured: OperatorTables) -> AttentionFamilies:
    """Fit the constants of the measured libraries; a library without constants starts from another's."""
    cores, found = base.multiprocessors, base.attention
    for kernels in measured.chunks.keys() | measured.decodes.keys():
        config = found.of(kernels if kernels in found.known else found.known[0])
        chunks, decodes = measured.chunks.get(kernels), measured.decodes.get(kernels)
        config = replace(config, chunks_together=any(chunk.prompts > 1 for chunk in chunks or ()))
        if chunks:
            config = _fit(config, CHUNKS, chunks, lambda c, x: chunks_seconds(c, x, cores))
        if decodes:
            config = _fit(config, DECODES, decodes, lambda c, x: decodes_seconds(c, x, cores))
        found = replace(found, **{kernels: config})
    return found


def fit_gemm(base: GemmConfig, products: Sequence[MatrixProduct], multiprocessors: int) -> GemmConfig:
    """Fit a sample from several starts, then all from the best: the choice of kernels causes many local optima.

    Each hidden size has the same weight, however many models have it.
    """
    space, random = FreeConstants(base, GEMM), np.random.default_rng(0)
    sample = [products[i] for i in random.permutation(len(products))[:SAMPLE_SIZE]]
    starts = [base]
    for _ in range(STARTS - 1):
        starts.append(space.config(space.vector(base) + random.normal(0, 0.3, len(space.vector(base)))))

    def fitted(start: GemmConfig, to: Sequence[MatrixProduct], steps: int) -> tuple[GemmConfig, float]:
        count = Counter(p.hidden for p in to)
        weights = np.array([1 / count[p.hidden] for p in to])
        predict = functools.partial(products_seconds, products=to, multiprocessors=multiprocessors)
        return fit(space, start, predict, _seconds(to), weights=weights, steps=steps)

    best, _ = min((fitted(start, sample, 25) for start in starts), key=lambda found: found[1])
    return fitted(best, products, 10)[0]


def fit_link(base: LinkConfig, files: dict[str, list[Message]], name: str) -> LinkConfig:
    """Fit a link to the files that `_kept` names, each with the same weight."""
    kept = _kept(files, name)
    messages = [message for file in kept for message in files[file]]
    weights = np.array([1 / len(files[file]) for file in kept for _ in files[file]])
    found: LinkConfig = _fit(base, LINK, messages, messages_seconds, weights)
    return found


def _kept(files: dict[str, list[Message]], name: str) -> list[str]:
    """Return the files to fit a link to: for sends, those by hidden size, if there are any.

    Other files of sends measure another network between nodes, and within a node kernels without their launch.
    """
    return [file for file in files if "all_reduce" in name or "hidden_size" in file] or list(files)


def _fit(
    base: Any,
    free: dict[str, Kind],
    measured: Sequence[Any],
    predict: Callable[[Any, Sequence[Any]], Array],
    weights: Array | None = None,
) -> Any:
    """Fit from `base` and from random starts around it, and return the best: curves with a knee have local optima."""
    space, random = FreeConstants(base, free), np.random.default_rng(0)
    middle = space.vector(base)
    starts = [base, *(space.config(middle + random.normal(0, 0.5, len(middle))) for _ in range(STARTS - 1))]
    found = [fit(space, start, lambda c: predict(c, measured), _seconds(measured), weights=weights) for start in starts]
    return min(found, key=lambda each: each[1])[0]


def _seconds(measured: Sequence[Any]) -> Array:
    return np.array([each.seconds for each in measured])


def errors(name: str, predicted: Array, measured: Sequence[Any]) -> list[Row]:
    """Return one row of errors; none without measurements."""
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


def errors_of(costs: CostsConfig, measured: OperatorTables) -> list[Row]:
    """Return the errors of `costs`."""
    cores, rows = costs.multiprocessors, []
    if products := measured.products:
        predicted = products_seconds(costs.gemm, products, cores)
        rows += errors_of_products(predicted, products)
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
    rows += errors("layers of experts", experts_seconds(costs, measured.experts), measured.experts)
    for name, products in measured.quantized.items():
        predicted = products_seconds(costs.gemm, products, cores, FORMATS[name])
        rows += errors(f"matrix products by {name}", predicted, products)
    for name, word in LINKS.items():
        files, link = getattr(measured, name), getattr(costs, name) or costs.all_reduce
        for file, messages in files.items():
            rows += errors(f"{word}, {file}", messages_seconds(link, messages), messages)
            if file not in _kept(files, name):
                own = _fit(link, LINK, messages[::2], messages_seconds)
                text = f"  constants of its own: {own.least_us:.0f} us, {own.gigabytes_per_s:.1f} GB/s"
                rows += errors(text, messages_seconds(own, messages[1::2]), messages[1::2])
    return rows


def errors_of_products(predicted: Array, products: Sequence[MatrixProduct]) -> list[Row]:
    """Return rows of errors by model, by operator and by TP; none if the tables name no models."""
    names = (lambda p: f"{p.model}", lambda p: f"  {p.operator}", lambda p: f"  tp {p.tp}")
    return [row for name in names for row in errors_by(name, predicted, products)] if products[0].model else []


def _band(product: MatrixProduct) -> str:
    bounds = (8, 64, 128, 256, 512, 1024, 2048)
    most = next((bound for bound in bounds if product.rows <= bound), None)
    return f"  {bounds[-1]}+ rows" if most is None else f"  up to {most} rows"
