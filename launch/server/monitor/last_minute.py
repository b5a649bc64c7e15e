"""Per-second statistics of the last minute, for the live page, in bounded memory."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ....runtime.analysis.ledger.quantiles import Quantiles
from ....runtime.analysis.live.idle_now import idle_at
from ....runtime.serving.messages import Snapshot

SECONDS = 60  # range of the charts
WINDOW = 10  # newest seconds, range of the live page's text, numbers and lanes


def _latencies() -> Quantiles:
    return Quantiles(resolution=0.02, most=1e6)


@dataclass(slots=True)
class _Second:
    """The events of one second, and the engine's state at its end."""

    began: float
    ended: float = math.inf
    ttft: Quantiles = field(default_factory=_latencies)
    tbt: Quantiles = field(default_factory=_latencies)
    running: int = 0
    waiting: int = 0
    kv_share: float = 0.0
    stage_seconds: list[list[float]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Output tokens."""
        return self.ttft.count + self.tbt.count

    @property
    def row(self) -> list[float | None]:
        """The row of the charts: time; tokens/s; running and waiting requests; KV usage; latencies in ms."""
        rate = round(self.tokens / (self.ended - self.began), 1)
        state = [round(self.ended, 3), rate, self.running, self.waiting, round(self.kv_share, 4)]
        return [*state, *_percentiles_ms([self.ttft]), *_percentiles_ms([self.tbt])]


class LastMinute:
    """The last `SECONDS` seconds: tokens and latencies as they occur, the engine's state once per second.

    Args:
        num_blocks: KV blocks of the pipeline.
        now: time in seconds, on the clock shared by the node's processes.
    """

    def __init__(self, num_blocks: int, now: float) -> None:
        self._num_blocks = num_blocks
        self._seconds: deque[_Second] = deque(maxlen=SECONDS + 1)  # the first only marks the start of the minute
        self._newest = _Second(now)
        self._ttft, self._tbt = array("d"), array("d")  # of the newest second

    def first_token(self, ttft: float) -> None:
        """Count a request's first token, `ttft` seconds after its arrival."""
        self._ttft.append(ttft)

    def next_token(self, seconds: float) -> None:
        """Count a token that arrived `seconds` after the previous one."""
        self._tbt.append(seconds)

    def end_second(self, snapshot: Snapshot | None, now: float) -> None:
        """Complete the newest second with the engine's state."""
        second = self._newest
        second.ended = now
        second.ttft.add(np.array(self._ttft))
        second.tbt.add(np.array(self._tbt))
        self._ttft, self._tbt = array("d"), array("d")
        if snapshot is not None:
            second.running, second.waiting = snapshot.running, snapshot.waiting
            second.kv_share = snapshot.kv_blocks_used / self._num_blocks
            second.stage_seconds = _stage_seconds(snapshot, now)
        self._seconds.append(second)
        self._newest = _Second(now)

    @property
    def rows(self) -> list[list[float | None]]:
        """One row per completed second, oldest first."""
        return [second.row for second in self._whole]

    @property
    def newest_row(self) -> list[float | None]:
        """The row of the newest completed second."""
        return self._seconds[-1].row

    @property
    def window_s(self) -> int:
        """Length of the window in seconds: `WINDOW`, or less after the start."""
        return len(self._window)

    @property
    def percentiles_ms(self) -> dict[str, list[float | None]]:
        """p50 and p99 over the window, in milliseconds, None without a value."""
        whole = self._window
        return {
            "ttft": _percentiles_ms([second.ttft for second in whole]),
            "tbt": _percentiles_ms([second.tbt for second in whole]),
        }

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second over the window; 0 before the first second is complete."""
        whole = self._window
        seconds = whole[-1].ended - whole[0].began if whole else 0.0
        return sum(second.tokens for second in whole) / seconds if seconds else 0.0

    @property
    def stage_seconds(self) -> list[list[float]]:
        """Seconds of the window by stage: busy, then idle in the order of `CAUSES`."""
        if not self._seconds:
            return []
        first = max(0, len(self._seconds) - 1 - WINDOW)
        before, after = self._seconds[first].stage_seconds, self._seconds[-1].stage_seconds
        if not before:
            return after
        stages = (zip(*stage, strict=True) for stage in zip(after, before, strict=True))
        return [[round(max(0.0, late - early), 6) for late, early in stage] for stage in stages]

    @property
    def _window(self) -> list[_Second]:
        return self._whole[-WINDOW:]

    @property
    def _whole(self) -> list[_Second]:
        seconds = list(self._seconds)
        return seconds[1:] if len(seconds) > SECONDS else seconds


def _percentiles_ms(parts: Sequence[Quantiles]) -> list[float | None]:
    """Return p50 and p99 in milliseconds of latencies in seconds; None without values."""
    whole = _latencies()
    for part in parts:
        whole.merge(part)
    return [round(1e3 * whole.quantile(share), 3) if whole.count else None for share in (0.5, 0.99)]


def _stage_seconds(snapshot: Snapshot, now: float) -> list[list[float]]:
    """Return the busy and idle seconds by stage until now."""
    return [[busy, *idle] for busy, idle in zip(snapshot.busy, idle_at(snapshot, now), strict=True)]
