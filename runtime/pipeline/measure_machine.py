"""Measures a rank's device: GEMM throughput and memory read bandwidth."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import cycle, islice

import torch

from ...kernels import processor
from ...kernels.packed import pack
from ...models.memory import BYTES, weight_bytes
from ...models.stage import Stage
from ...models.stage_spec import StageSpec
from ...parallel.mesh import Mesh
from ..core.stage_floor import StageMachine

_LEAST_WEIGHTS = 32 << 20  # bytes of a rank's weights: fewer fit into caches, and bandwidth does not matter
_READ_BYTES = {"cpu": 96 << 20, "cuda": 512 << 20}  # larger than caches
_PARTS = {"cpu": 6, "cuda": 1}  # chunks of a read: other load on a CPU interrupts long reads
_SIDES = {"cpu": (256, 4096), "cuda": (1024, 8192)}  # of the matrices: smallest and largest
_ENOUGH_S = 0.02  # for GEMMs of one size, and for reads
_GEMMS, _READS = 5, 24  # at most; GEMMs per size
_ROOM = 4  # this many times the bytes read must be free


def measure_machine(spec: StageSpec, mesh: Mesh, device: torch.device) -> StageMachine:
    """Measure a rank's device in 0.1 to 0.2 s, with the threads that the rank computes with.

    All ranks of a node should do so at the same time, since they share its memory. Nothing is measured if the rank's
    weights are small or memory is short.
    """
    dtype = spec.model.dtype
    weights = weight_bytes(spec.arch, mesh, range(*spec.layers), BYTES[dtype])
    if weights < _LEAST_WEIGHTS or _free_bytes(device) < _ROOM * _READ_BYTES[device.type]:
        return StageMachine()
    # A processor without bfloat16 instructions computes it as float32.
    is_slow = device.type == "cpu" and dtype == "bfloat16" and not processor.multiplies_bfloat16()
    return _measured(device, "float32" if is_slow else dtype, torch.get_num_threads())


def slow_reason(stage: Stage) -> str:
    """Return why a stage on a CPU lacks kernels for its processor; empty if it has them, and on CUDA."""
    if stage.device.type != "cpu":
        return ""
    level = processor.level()
    if stage.spec.model.kernels == "torch":
        return "model.kernels=torch disables the C++ kernels"
    if not stage.fallback_reason or level is None:
        return stage.fallback_reason
    return f"this build has no kernels for its instruction set, {level.name}"


@cache
def _measured(device: torch.device, dtype: str, threads: int) -> StageMachine:
    """Measure a device once per process, with `threads` threads and with one, since other load may stall several."""
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
    """Return the best TFLOP/s of square GEMMs, each twice as wide as the previous one, until time is up.

    On a CPU the stages' own GEMM counts too: torch's takes up to twice as long on some processors.
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
    """Return the upper-quartile GB/s of sums; the fastest may be partly served from a cache."""
    size, parts = _READ_BYTES[device.type], _PARTS[device.type]
    source = torch.ones(size // 8, dtype=torch.int64, device=device)
    reads = islice(cycle([part.sum for part in source.chunk(parts)]), _READS)
    times = sorted(_times(list(reads), device))
    return 1e-9 * size / parts / times[len(times) // 4]


def _times(runs: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Return the seconds of each run until time is up, after a warm-up run, on the device's own clock."""
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
