"""The device's peak rates: GEMM and memory bandwidth."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import cycle

import torch

from gapless.conf.architecture import Architecture

from .model import architecture, dtype_of
from .parts import Task
from .rows import Row
from .timing import seconds_of

ROWS = 512
LONG = (0.5, 1000)  # seconds and runs: enough for an idle GPU to raise its clock
COPIES = 4  # of the weights of each shape, used in turn so that they are cold
GEMM = "GEMM (TFLOP/s)"
BANDWIDTH = "bandwidth (GB/s)"


def floor(task: Task) -> Iterator[Row]:
    """Time `torch.mm` with a layer's shapes and 512 rows, and large copies and reads; the best of each is the peak."""
    rates = list[float]()
    for name, (inputs, outputs) in linear_shapes(architecture("llama-13b", task.small)).items():
        rate = _gemm_rate(task.device, inputs, outputs)
        rates.append(rate)
        yield Row(part="floor", quantity=f"{name} (TFLOP/s)", setting=f"{ROWS} x {inputs} x {outputs}", value=rate)
    copied, read = _memory_rates(task.device, (1 << 24) if task.small else (1 << 31))
    yield Row(part="floor", quantity="copy (GB/s)", setting="read and written", value=copied)
    yield Row(part="floor", quantity="read (GB/s)", setting="a sum", value=read)
    yield Row(part="floor", quantity=GEMM, setting="the best of these shapes", value=max(rates))
    yield Row(part="floor", quantity=BANDWIDTH, setting="the better of both", value=max(copied, read))


def linear_shapes(arch: Architecture) -> dict[str, tuple[int, int]]:
    """Return the input and output sizes of a layer's linear operators, by their names in the paper's Table 1."""
    H, N, K, D = arch.hidden_size, arch.num_heads, arch.num_kv_heads, arch.head_dim
    gate = 2 if arch.gated_ffn else 1
    return {
        "preproj": (H, (N + 2 * K) * D),
        "postproj": (N * D, H),
        "ffn_ln1": (H, gate * arch.ffn_size),
        "ffn_ln2": (arch.ffn_size, H),
    }


def _gemm_rate(device: str, inputs: int, outputs: int) -> float:
    """Return TFLOP/s of `torch.mm` over 512 rows, with weights in a stage's layout: [outputs, inputs]."""
    where, dtype = torch.device(device), dtype_of(device)
    x = torch.randn(ROWS, inputs, device=where, dtype=dtype)
    weights = [torch.randn(outputs, inputs, device=where, dtype=dtype).t() for _ in range(COPIES)]
    out = torch.empty(ROWS, outputs, device=where, dtype=dtype)
    following = cycle(weights)

    def products() -> None:
        for _ in range(COPIES):
            torch.mm(x, next(following), out=out)

    return 2e-12 * COPIES * ROWS * inputs * outputs / seconds_of(products, where, *LONG)


def _memory_rates(device: str, size: int) -> tuple[float, float]:
    """Return GB/s of a copy (reads and writes) and of a read of `size` bytes."""
    where = torch.device(device)
    source = torch.ones(size // 4, device=where)
    target = torch.empty_like(source)
    copied = 2e-9 * size / seconds_of(partial(target.copy_, source), where, *LONG)
    return copied, 1e-9 * size / seconds_of(source.sum, where, *LONG)
