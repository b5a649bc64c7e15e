"""Compares predicted times of MoE layers with published ones: `python -m benchmarks.experts`.

Nothing was fitted to the published times. The first tables compare the fused kernels of one layer in bfloat16 with
random routing (vLLM's `benchmark_moe.py`): top-k selection, both GEMMs, activation and sum. The last one compares whole
batches (vLLM's `benchmark_latency.py`). Errors are simulated / published - 1. The sources are pull requests of
vllm-project/vllm.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from gapless.conf.architecture import Architecture
from gapless.conf.build import build, load_group, load_hardware
from gapless.conf.costs import CostsConfig
from gapless.conf.experts import ExpertsConfig
from gapless.conf.schema import ModelConfig
from gapless.runtime.simulation.cost.analytic import AnalyticOperators
from gapless.runtime.simulation.cost.gemm import Gemm, Products
from gapless.runtime.simulation.cost.pointwise import Pointwise
from gapless.runtime.simulation.cost.stage_costs import MicroBatchShape, StageCosts

from .support.harness import Benchmark


@dataclass(frozen=True)
class Layer:
    """Published microseconds of one layer's kernels, by number of tokens. `width`: an expert's FFN size on one rank."""

    name: str
    source: str
    device: str
    hidden: int
    width: int
    experts: int
    picked: int
    published: dict[int, float]


@dataclass(frozen=True)
class Run:
    """Published seconds of a batch's prefill and decodes, by batch size."""

    model: str
    source: str
    device: str
    tp: int
    input_len: int
    output_len: int
    published: dict[int, float]


LAYERS = (
    Layer("Mixtral 8x7B, TP 2", "pull request 24700, tuned tiles", "h100", 4096, 7168, 8, 2, {
        1: 144.03, 2: 229.28, 4: 351.10, 8: 434.98, 16: 471.49, 24: 478.27, 32: 487.35, 48: 487.85, 64: 483.14,
        96: 494.42, 128: 491.39, 256: 536.77, 512: 662.33, 1024: 833.72, 1536: 1122.93,
    }),
    Layer("64 experts of 1408, 6 a token", "pull request 40542, tuned tiles", "a100-80g", 2048, 1408, 64, 6, {
        1: 183.5, 4: 266.2, 16: 523.3, 64: 677.6, 256: 717.0, 1024: 929.9, 4096: 2636.6,
    }),
    Layer("128 experts of 704, 8 a token", "pull request 44818, tuned tiles", "h200", 2816, 704, 128, 8, {
        1: 185.1, 2: 188.9, 4: 185.1, 8: 204.4, 16: 264.1, 24: 314.4, 32: 324.9, 48: 365.5, 64: 384.1, 96: 390.3,
        128: 396.4, 256: 419.6, 512: 442.3, 1024: 528.4, 1536: 582.0, 2048: 728.2, 3072: 962.9, 4096: 1189.6,
    }),
)  # fmt: skip
RUNS = (
    Run("mixtral-8x22b", "pull request 4002, tuned tiles", "a100-80g", 4, 32, 128, {8: 5.427, 16: 6.108, 32: 6.894}),
    Run("mixtral-8x22b", "pull request 4002, tuned tiles", "a100-80g", 8, 32, 128, {8: 3.708, 16: 4.047, 32: 4.391}),
    Run("mixtral-8x7b", "pull request 3240, tuned tiles", "a100-80g", 2, 1000, 50, {
        1: 0.762, 2: 1.033, 4: 1.449, 8: 2.034, 16: 2.893, 32: 4.531, 64: 7.537,
    }),
    Run("mixtral-8x7b", "pull request 2542, the first kernel, not tuned", "h100", 8, 1000, 50, {
        1: 0.459, 2: 0.515, 4: 0.610, 8: 0.813, 16: 1.044, 32: 1.489, 64: 2.419,
    }),
)  # fmt: skip


def arch_of(model: str) -> Architecture:
    found = build(ModelConfig, load_group("model", model), "model").architecture
    assert found is not None
    return found


def costs_of(device: str) -> CostsConfig:
    costs = load_hardware(device).costs
    assert costs is not None
    return costs


def layer_us(layer: Layer, tokens: int) -> float:
    """Predict the microseconds of a layer's kernels without the router, which was not timed."""
    experts = ExpertsConfig(num_experts=layer.experts, experts_per_token=layer.picked)
    arch = replace(arch_of("qwen3-30b-a3b"), hidden_size=layer.hidden, ffn_size=layer.width, experts=experts)
    costs = costs_of(layer.device)
    source = AnalyticOperators(arch, 1, costs, 2, attention=load_hardware(layer.device).attention)
    seconds = source.linear("ffn_ln1", tokens) + source.linear("ffn_ln2", tokens) + source.routing(tokens)
    router = Products(Gemm(costs.gemm, costs.multiprocessors, 2), [(layer.hidden, layer.experts)])
    elements = 2 * layer.width
    moved = layer.picked * 3 * layer.width * 2
    activation = Pointwise(costs.pointwise, [(elements, moved, costs.pointwise.activation_gigabytes_per_s)])
    return 1e6 * (seconds - router.seconds(tokens)[0] + activation.seconds(tokens))


def run_seconds(run: Run, batch: int) -> float:
    """Predict the seconds of a batch: one prefill micro-batch, then decodes."""
    arch = arch_of(run.model)
    kernels = load_hardware(run.device).attention
    source = AnalyticOperators(arch, run.tp, costs_of(run.device), 2, attention=kernels)
    stage = StageCosts([arch.num_layers], [source])
    seconds = stage.seconds(MicroBatchShape(((run.input_len, 0),) * batch, sampled=batch))[0]
    for step in range(1, run.output_len):
        decodes = MicroBatchShape((), batch, batch * (run.input_len + step), batch)
        seconds += stage.seconds(decodes)[0]
    return seconds


def main() -> int:
    bench = Benchmark(__doc__)

    def compare(size: str, unit: str, published: dict[int, float], predict: Callable[[int], float], **of: Any) -> None:
        errors = []
        for number, value in published.items():
            predicted = predict(number)
            errors.append(predicted / value - 1)
            numbers = {size: number, f"published_{unit}": value, f"model_{unit}": predicted, "error_share": errors[-1]}
            bench.row("layers" if unit == "us" else "batches", **of, **numbers)
        bench.row("errors", **of, median_error_share=float(np.median(np.abs(errors))))

    for layer in LAYERS:
        setting = f"{layer.name}, {layer.device} ({layer.source})"
        compare("tokens", "us", layer.published, partial(layer_us, layer), setting=setting)
    for run in RUNS:
        setting = f"{run.model}, {run.device}, TP {run.tp}, {run.input_len} in, {run.output_len} out ({run.source})"
        compare("batch", "s", run.published, partial(run_seconds, run), setting=setting)
    return bench.end()


if __name__ == "__main__":
    sys.exit(main())
