"""Compares the time of each operator in one process with its floor: `python -m benchmarks.operators`.

Workload and models are those of `benchmarks/peer.py`, in one process on all cores, under `equal_time`. An operator's
floor is the larger of two times: its FLOPs / the rate of GEMMs with 256 rows, and the bytes of weights, keys, values
and activations that it reads and writes / the bandwidth of GEMVs, which read weights. Both rates are measured in the
same run. Small tensors are in caches and may be faster. `--png FILE` draws the table. `--products` shows only the GEMMs
of one layer, in microseconds by number of rows, with bfloat16 and quantized weights.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gapless import LLM
from gapless.conf.sampling import SamplingParams
from gapless.conf.schema import ModelConfig
from gapless.kernels.attention import PagedAttention
from gapless.kernels.operators.cpp import CppKernels
from gapless.kernels.packed import PackedWeight
from gapless.kernels.quantized import QuantizedWeight
from gapless.kernels.quantized_matrix import WeightFormat
from gapless.models.checkpoint import Checkpoint
from gapless.parallel.layers import LMHead
from gapless.runtime.pipeline.stage_worker import StageWorker

from .peer import MODELS
from .support.harness import Benchmark, scratch
from .support.peer_floor import ROWS, Products

ELEMENT = 4  # bytes
FEW_ROWS = 32
FORMATS = {  # group 0: a whole row
    "bfloat16": None,
    "int8": WeightFormat(8, 0),
    "int8_both": WeightFormat(8, 0, int8_activations=True),
    "int8_by_32": WeightFormat(8, 32),
    "int4_by_32": WeightFormat(4, 32, has_offsets=True),
}


@dataclass(slots=True)
class Operator:
    """Time and minimum time of an operator's calls."""

    calls: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    floor_s: float = 0.0


class Stopwatch:
    """Accumulates the exclusive time of operators.

    Args:
        flops_per_s: best GEMM rate.
        bytes_per_s: bandwidth of reading weights.
    """

    def __init__(self, flops_per_s: float, bytes_per_s: float) -> None:
        self.operators: defaultdict[str, Operator] = defaultdict(Operator)
        self._flops_per_s = flops_per_s
        self._bytes_per_s = bytes_per_s
        self._inner = [0.0]  # time of nested operators, by call depth

    def time(self, owner: type, method: str, cost: Callable[..., tuple[str, float, float]]) -> None:
        """Patch a method to be timed. `cost` returns a call's operator, FLOPs and bytes from its arguments."""
        call = getattr(owner, method)

        @functools.wraps(call)
        def timed(*args: Any, **keys: Any) -> Any:
            self._inner.append(0.0)
            begin = time.perf_counter()
            result = call(*args, **keys)
            seconds = time.perf_counter() - begin
            name, flops, moved = cost(*args, **keys)
            operator = self.operators[name]
            operator.calls += 1
            operator.seconds += seconds - self._inner.pop()
            operator.flops += flops
            operator.bytes += moved
            operator.floor_s += max(flops / self._flops_per_s, moved / self._bytes_per_s)
            self._inner[-1] += seconds
            return result

        setattr(owner, method, timed)


def product(weight: Any, x: Any, *_: Any) -> tuple[str, float, float]:
    rows, width = x.shape
    name = f"GEMMs, {'up to' if rows <= FEW_ROWS else 'over'} {FEW_ROWS} rows"
    elements = width * weight._out_size
    return name, 2.0 * rows * elements, ELEMENT * (elements + rows * (width + weight._out_size))


def head(layer: Any, x: Any) -> tuple[str, float, float]:
    """Return the cost of an LM head tied to an unpacked embedding; a packed one counts as a GEMM."""
    if layer.packed is not None:
        return "rest of the stage", 0.0, 0.0
    return "LM head (tied)", 2.0 * len(x) * layer.weight.numel(), ELEMENT * layer.weight.numel()


def decodes(_: Any, q: Any, keys: Any, values: Any, starts: Any, *__: Any) -> tuple[str, float, float]:
    B, K, G, D = q.shape
    context = int(starts.sum()) + B
    return "decode attention", 4.0 * context * K * G * D, 2.0 * ELEMENT * context * K * D


def chunk(_: Any, q: Any, keys: Any, values: Any, table: Any, start: Any, *__: Any) -> tuple[str, float, float]:
    N, K, G, D = q.shape
    pairs = N * start + N * (N + 1) / 2
    return "chunk attention", 4.0 * pairs * K * G * D, 2.0 * ELEMENT * (start + N) * K * D


def small(name: str, factor: float) -> Callable[..., tuple[str, float, float]]:
    """Return a cost function: `factor` times the bytes of the first tensor."""
    return lambda _, x, *__, **___: (name, 0.0, factor * x.numel() * ELEMENT)


def other(name: str) -> Callable[..., tuple[str, float, float]]:
    return lambda *_, **__: (name, 0.0, 0.0)


CALLS: tuple[tuple[type, str, Callable[..., tuple[str, float, float]]], ...] = (
    (PackedWeight, "linear", product),
    (QuantizedWeight, "linear", product),
    (LMHead, "forward", head),
    (PagedAttention, "attend_decodes", decodes),
    (PagedAttention, "attend_chunk", chunk),
    (CppKernels, "norm", small("norm, activation, RoPE, KV writes", 2.0)),
    (CppKernels, "gated_silu", small("norm, activation, RoPE, KV writes", 1.5)),
    (CppKernels, "rotate_and_write", small("norm, activation, RoPE, KV writes", 2.5)),
    (StageWorker, "prepare", other("input preparation")),
    (StageWorker, "queue_sampling", other("sampling")),
    (StageWorker, "forward", other("rest of the stage")),
)


def main() -> int:
    model = {"choices": MODELS, "default": "llama-12x768"}
    png = {"type": Path, "metavar": "FILE"}
    bench = Benchmark(__doc__, model=model, requests=32, output=64, png=png, products=False)
    given = bench.given
    if given.products:
        return show_products(bench)
    lengths = np.random.default_rng(0).integers(128, 513, given.requests)
    with scratch() as scratched:
        folder = str(scratched / "model")
        MODELS[given.model](Path(folder))
        arch = Checkpoint.open(ModelConfig(weights=folder)).arch
        products = Products(arch)
        rate = 2 * products.elements * ROWS / products.seconds(ROWS)
        bandwidth = ELEMENT * products.elements / products.seconds(1)
        del products
        watch = Stopwatch(rate, bandwidth)
        for call in CALLS:
            watch.time(*call)
        ids = np.random.default_rng(1)
        prompts = [ids.integers(5, arch.vocab_size, n).tolist() for n in lengths]
        with LLM(folder, **{"model.tokenizer": "none", "scheduler": "equal_time"}) as llm:
            llm.generate(prompts[:4], SamplingParams(max_tokens=4, ignore_eos=True))
            watch.operators.clear()
            begin = time.perf_counter()
            llm.generate(prompts, SamplingParams(max_tokens=given.output, ignore_eos=True))
            seconds = time.perf_counter() - begin
    measured = sum(operator.seconds for operator in watch.operators.values())
    watch.operators["scheduler, coordinator, outputs"] = Operator(seconds=seconds - measured)
    for name, of in sorted(watch.operators.items(), key=lambda item: -item[1].seconds):
        rates = {"gflops": of.flops / of.seconds / 1e9, "gb_per_s": of.bytes / of.seconds / 1e9}
        times = {"seconds": of.seconds, "time_share": of.seconds / seconds, "floor_s": of.floor_s}
        bench.row("operators", operator=name, calls=of.calls, **times, **rates)
    rows = bench.tables["operators"]
    floor = sum(row["floor_s"] for row in rows)
    best = {"gflops": rate / 1e9, "gb_per_s": bandwidth / 1e9, "floor_s": floor, "floor_share": floor / seconds}
    bench.row("run", seconds=seconds, **best)
    if given.png:
        draw(given.png, f"{given.model}, one process: {seconds:.1f} s", rows)
    return bench.end()


def show_products(bench: Benchmark) -> int:
    """Measure the GEMMs of a layer in all formats, by number of rows."""
    with scratch() as scratched:
        folder = scratched / "model"
        MODELS[bench.given.model](Path(folder))
        arch = Checkpoint.open(ModelConfig(weights=str(folder))).arch
    kinds = {name: Products(arch, torch.bfloat16, format) for name, format in FORMATS.items()}
    for rows in (1, 4, 16, 64, ROWS):
        bench.row("products", rows=rows, **{f"{name}_us": 1e6 * of.seconds(rows) for name, of in kinds.items()})
    return bench.end()


def draw(path: Path, title: str, rows: list[dict[str, Any]]) -> None:
    """Draw one bar per operator, with its floor in a darker colour."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = [row["operator"] for row in rows][::-1]
    taken = [row["seconds"] for row in rows][::-1]
    floors = [min(row["floor_s"], row["seconds"]) for row in rows][::-1]
    axes.barh(names, taken, color="#c9d6e8", label="time above the floor")
    axes.barh(names, floors, color="#2f5d8c", label="floor: minimum for FLOPs or bytes")
    for number, seconds in enumerate(taken):
        axes.text(seconds, number, f" {seconds:.2f} s", va="center", fontsize=8)
    axes.set_xlabel("seconds")
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.1)
    axes.legend(loc="lower right", frameon=False, fontsize=8)
    figure.savefig(path, dpi=200)


if __name__ == "__main__":
    sys.exit(main())
