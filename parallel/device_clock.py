"""Timestamps of a device's work, on the host's monotonic clock.

On a CPU work is done when its call returns, so a moment is the clock's time. On CUDA work is queued: a moment is an
event on a stream, and its time is known once the device has passed it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

_RENEW_S = 10.0  # an event's time since the base is a float32 in ms: after 10 s its precision is 1 us


class DeviceClock:
    """Marks moments of a device's work, and returns their times. The base class is for CPUs: a moment is a time."""

    def mark(self) -> Any:
        """Return the moment at which the device has finished all work queued so far on the current stream."""
        return time.monotonic()

    def seconds(self, moment: Any) -> float:
        """Wait until the device has passed a moment, and return its time by `time.monotonic`."""
        return float(moment)


@dataclass(frozen=True, slots=True)
class _Base:
    """An event whose host time is known to within about 20 microseconds."""

    event: torch.cuda.Event
    seconds: float


class CudaClock(DeviceClock):
    """The clock of a CUDA device. One thread marks; any thread may ask for the time of a moment."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # separate, so that a base does not wait for other work
        self._base = self._now()

    def mark(self) -> tuple[torch.cuda.Event, _Base]:
        """Record an event on the current stream; `seconds` returns its time later."""
        if time.monotonic() - self._base.seconds > _RENEW_S:
            self._base = self._now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event, self._base

    def seconds(self, moment: tuple[torch.cuda.Event, _Base]) -> float:
        """Wait until the device has reached the moment; return its time in seconds on the host's monotonic clock."""
        event, base = moment
        event.synchronize()
        since_base: float = base.event.elapsed_time(event) / 1e3
        return base.seconds + since_base

    def _now(self) -> _Base:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        event.synchronize()
        return _Base(event, time.monotonic())


def device_clock(device: torch.device) -> DeviceClock:
    """Return the clock for a device's type."""
    return CudaClock(device) if device.type == "cuda" else DeviceClock()
