"""Compares a stage with the device's peak rates, and measures the cost of piggybacked decodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from gapless.conf.architecture import Architecture
from gapless.models.stage import Stage, StageInputs
from gapless.runtime.simulation.cost.stage_costs import MicroBatchShape

from ..paper.one_gpu import CHUNK, LLAMA_13B_BATCHES, decodes
from .floor import BANDWIDTH, GEMM, linear_shapes
from .model import batch_of, dtype_of, llama_13b, with_graphs
from .parts import Task
from .rows import Row, aimed
from .timing import host_seconds_of, seconds_of

PREFILL_SHARE = 0.65  # of the floor's GEMM rate
DECODE_SHARE = 0.80  # of the floor's bandwidth
RIDING_SHARE = 0.1  # of the time of a decode in a decode-only batch
LENGTH = 1024


def plain(task: Task) -> Iterator[Row]:
    """Time micro-batches without CUDA graphs."""
    stage = llama_13b(task.device, task.small)
    for row in _measure("plain", task, stage, stage):
        yield replace(row, goal=None, relation="=", status="")


def goals(task: Task) -> Iterator[Row]:
    """Time micro-batches as a run computes them, with CUDA graphs."""
    stage = llama_13b(task.device, task.small)
    yield from _measure("goals", task, stage, with_graphs(stage).forward)


def _measure(part: str, task: Task, stage: Stage, forward: Callable[[StageInputs], torch.Tensor]) -> Iterator[Row]:
    """Time chunks, decodes, and both; the last layer computes only sampled rows, as in a run."""
    arch, element = stage.arch, dtype_of(task.device).itemsize
    gemm, bandwidth = task.value("floor", GEMM), task.value("floor", BANDWIDTH)
    layers = f"{arch.num_layers} layers"

    def seconds(shape: MicroBatchShape) -> float:
        inputs = stage.prepare(batch_of(shape))
        return seconds_of(lambda: forward(inputs), stage.device)

    def host_seconds(shape: MicroBatchShape) -> float:
        inputs = stage.prepare(batch_of(shape))
        return host_seconds_of(lambda: forward(inputs), stage.device)

    for prefix in (0, 512):
        shape = MicroBatchShape(((512, prefix),), sampled=1)
        rate = flops(arch, shape) / seconds(shape) / 1e12
        setting = f"chunk 512 after {prefix}, {layers}"
        yield Row(part=part, quantity="prefill (TFLOP/s)", setting=setting, value=rate)
        yield aimed(part, "prefill, share of the GEMM rate", setting, rate / gemm, PREFILL_SHARE)
    batch = LLAMA_13B_BATCHES[LENGTH]
    for number in (1, 4, batch):
        shape = decodes(number, LENGTH)
        taken = seconds(shape)
        rate = bytes_read(arch, shape, element) / taken / 1e9
        setting = f"{number} decode{'s' * (number > 1)} over {LENGTH}, {layers}"
        yield Row(part=part, quantity="decode-only iteration (ms)", setting=setting, value=1e3 * taken)
        yield Row(
            part=part, quantity="until the host has queued it (ms)", setting=setting, value=1e3 * host_seconds(shape)
        )
        yield Row(part=part, quantity="decode (GB/s)", setting=setting, value=rate)
        yield aimed(part, "decode, share of the bandwidth", setting, rate / bandwidth, DECODE_SHARE)
    for number in (4, batch):
        riding = number - 1
        chunk = ((CHUNK - riding, 0),)
        alone = seconds(decodes(number, LENGTH)) / number
        mixed = seconds(MicroBatchShape(chunk, riding, riding * LENGTH, riding))
        added = (mixed - seconds(MicroBatchShape(chunk, sampled=1))) / riding
        setting = f"{riding} with a chunk of {CHUNK - riding}, {layers}"
        yield Row(part=part, quantity="piggybacked decode (ms)", setting=setting, value=1e3 * added)
        yield aimed(
            part,
            "piggybacked decode / decode in a decode-only batch",
            setting,
            added / alone,
            RIDING_SHARE,
            "<=",
        )


def flops(arch: Architecture, shape: MicroBatchShape) -> float:
    """Return the FLOPs of a chunk on a stage with embedding and LM head, whose last layer computes only sampled rows.

    Counts GEMMs and causal attention.
    """
    ((length, prefix),) = shape.chunks
    sizes = {name: inputs * outputs for name, (inputs, outputs) in linear_shapes(arch).items()}
    pairs = length * prefix + length * (length + 1) / 2  # of a query and a key
    attention = 4.0 * arch.num_heads * arch.head_dim
    whole = 2.0 * length * sum(sizes.values()) + attention * pairs
    after = sum(sizes.values()) - sizes["preproj"]
    last = 2.0 * length * sizes["preproj"] + shape.sampled * (2.0 * after + attention * (length + prefix))
    return (arch.num_layers - 1) * whole + last + 2.0 * shape.sampled * arch.hidden_size * arch.vocab_size


def bytes_read(arch: Architecture, shape: MicroBatchShape, element: int) -> float:
    """Return the minimum bytes of weights, keys and values that decodes read; `element`: bytes per element."""
    weights = arch.num_layers * sum(inputs * outputs for inputs, outputs in linear_shapes(arch).values())
    cache = 2.0 * arch.num_layers * shape.context * arch.num_kv_heads * arch.head_dim
    return element * (weights + cache + arch.hidden_size * arch.vocab_size)
