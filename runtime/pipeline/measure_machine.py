"""Measures what a rank's device gives: the rate of its GEMMs and of reads from its memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import cycle, islice

import torch

from ...kernels import processor
from ...kernels.packed import pack
from ...models.memory import BYTES, resolve_dtype, weight_bytes
from ...models.stage import Stage
from ...parallel.mesh import Mesh
from ..core.stage_floor import StageMachine
from .handshake import Setup

_LEAST_WEIGHTS = 32 << 20  # bytes of a rank's weights: fewer are read from caches, and bandwidth does not matter
_READ_BYTES = {"cpu": 96 << 20, "cuda": 512 << 20}  # larger than caches
_PARTS = {"cpu": 6, "cuda": 1}  # in which they are read: others' work on a processor interrupts long reads
_SIDES = {"cpu": (256, 4096), "cuda": (1024, 8192)}  # of the matrices: the first, and the largest
_ENOUGH_S = 0.02  # of GEMMs of one size, and of reads
_GEMMS, _READS = 5, 24  # at most, of a size
_ROOM = 4  # times as much memory must be free as is read


def measure_machine(setup: Setup, mesh: Mesh, device: torch.device) -> StageMachine:
    """Measure the device of a rank, in 0.1 to 0.2 s, by the threads that the rank computes with.

    All ranks of a node should do so at the same time, since they share its memory. Nothing is measured where the rank's
    weights are few or memory is short.
    """
    dtype = resolve_dtype(setup.model, device.type)
    weights = weight_bytes(setup.arch, mesh, range(*setup.layers[mesh.stage]), BYTES[dtype])
    if weights < _LEAST_WEIGHTS or _free_bytes(device) < _ROOM * _READ_BYTES[device.type]:
        return StageMachine()
    # A processor that does not multiply bfloat16 computes it as float32.
    is_slow = device.type == "cpu" and dtype == "bfloat16" and not processor.multiplies_bfloat16()
    return _measured(device, "float32" if is_slow else dtype, torch.get_num_threads())


def slow_reason(setup: Setup, stage: Stage) -> str:
    """Return why a stage on a CPU lacks the kernels of its processor; empty where it has them, and on CUDA."""
    if stage.device.type != "cpu":
        return ""
    level = processor.level()
    if setup.model.kernels == "torch":
        return "model.kernels=torch leaves the C++ kernels out"
    if not stage.fallback_reason or level is None:
        return stage.fallback_reason
    return f"this build has no kernels for its instruction set, {level.name}"


@cache
def _measured(device: torch.device, dtype: str, threads: int) -> StageMachine:
    """Measure a device once in a process, with `threads` threads, and with one, as others' work may halt several."""
    rates = []
    for count in dict.fromkeys((threads, 1) if device.type == "cpu" else (threads,)):
        torch.set_num_threads(count)
        rates.append((_gemm_tflops(device, getattr(torch, dtype)), _gigabytes_per_s(device)))
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    tflops, gigabytes_per_s = map(max, zip(*rates, strict=True))
    return StageMachine({dtype: tflops}, gigabytes_per_s)


def _gemm_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the best TFLOP/s of square matrices, each twice as wide as the one before, until time is up.

    On a CPU the stages' own products count too: torch's own takes up to twice as long on some processors.
    """
    side, most = _SIDES[device.type]
    best, end = 0.0, time.perf_counter() + _ENOUGH_S
    while True:
        x_NN = torch.ones(side, side, dtype=dtype, device=device)
        packed = pack(x_NN)
        products: list[Callable[[torch.Tensor], torch.Tensor]] = [partial(torch.mm, x_NN)]
        if packed is not None:
            products.append(packed.linear)
        seconds = min(min(_times([partial(product, x_NN)] * _GEMMS, device)) for product in products)
        best = max(best, 2e-12 * side**3 / seconds)
        if time.perf_counter() >= end or 2 * side > most:
            return best
        side *= 2


def _gigabytes_per_s(device: torch.device) -> float:
    """Return the GB/s of sums, that three of four do not reach: a cache may have a part of the fastest."""
    size, parts = _READ_BYTES[device.type], _PARTS[device.type]
    source = torch.ones(size // 8, dtype=torch.int64, device=device)
    reads = islice(cycle([part.sum for part in source.chunk(parts)]), _READS)
    times = sorted(_times(list(reads), device))
    return 1e-9 * size / parts / times[len(times) // 4]


def _times(runs: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Return the seconds of runs until time is up, after one that warms up, on the device's own clock."""
    runs[0]()
    times: list[float] = []
    for run in runs:
        if sum(times) >= _ENOUGH_S:
            break
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(torch.cuda.current_stream(device))
            run()
            end.record(torch.cuda.current_stream(device))
            end.synchronize()
            seconds = begin.elapsed_time(end) / 1e3
        else:
            start = time.perf_counter()
            run()
            seconds = time.perf_counter() - start
        times.append(seconds)
    return times


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
