"""Times work on a device: with events on CUDA, by the clock on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import TypeVar

import torch

T = TypeVar("T")
LEAST_RUNS = 3


def repeated(measure: Callable[[], T], patience_s: float = 0.1, most: int = 20) -> list[T]:
    """Call `measure` 3 times, then up to `most` times while the total time is below `patience_s`."""
    began, found = time.perf_counter(), list[T]()
    while len(found) < LEAST_RUNS or (len(found) < most and time.perf_counter() - began < patience_s):
        found.append(measure())
    return found


def seconds_of(run: Callable[[], object], device: torch.device, patience_s: float = 0.1, most: int = 20) -> float:
    """Return the median seconds of `run` from idle device to idle device, after one warm-up run."""
    run()
    return median(repeated(lambda: _once(run, device), patience_s, most))


def _once(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    torch.cuda.synchronize(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def host_seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds until `run` returns, starting from an idle device; its work may still be queued."""

    def once() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    run()
    return median(repeated(once))
