"""The last seconds of a server, one by one, for its live page: what happened, in bounded memory."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ...runtime.ledger.quantiles import Quantiles
from ...runtime.serving.messages import Snapshot

SECONDS = 60  # that the charts show
WINDOW = 10  # the newest of them, of which words, numbers and lanes speak


def _latencies() -> Quantiles:
    return Quantiles(resolution=0.02, most=1e6)


@dataclass(slots=True)
class _Second:
    """What came since the second before ended. The state is that at its end."""

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
        """What the charts show: the time; tokens/s; requests; share of the KV blocks; latencies in ms."""
        rate = round(self.tokens / (self.ended - self.began), 1)
        state = [round(self.ended, 3), rate, self.running, self.waiting, round(self.kv_share, 4)]
        return [*state, *_percentiles_ms([self.ttft]), *_percentiles_ms([self.tbt])]


class LastMinute:
    """The newest `SECONDS` seconds: tokens and latencies as they come, the engine's state once a second.

    Args:
        num_blocks: KV blocks of the pipeline.
        now: on the clock of all processes of the node, in seconds.
    """

    def __init__(self, num_blocks: int, now: float) -> None:
        self._num_blocks = num_blocks
        self._seconds: deque[_Second] = deque(maxlen=SECONDS + 1)  # the first says only where the minute begins
        self._newest = _Second(now)
        self._ttft, self._tbt = array("d"), array("d")  # of the newest second

    def first_token(self, ttft: float) -> None:
        """Count a request's first token, which came `ttft` seconds after its arrival."""
        self._ttft.append(ttft)

    def next_token(self, seconds: float) -> None:
        """Count a token that came `seconds` after the one before."""
        self._tbt.append(seconds)

    def end_second(self, snapshot: Snapshot | None, now: float) -> None:
        """End the newest second with the state of the engine."""
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
        """A row for each second that is over, oldest first."""
        return [second.row for second in self._whole]

    @property
    def newest_row(self) -> list[float | None]:
        """The row of the newest second that is over, as in `rows`."""
        return self._seconds[-1].row

    @property
    def window_s(self) -> int:
        """How many seconds the window has by now: `WINDOW`, but in the beginning."""
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
        """Output tokens per second over the window; 0 before the first second is over."""
        whole = self._window
        seconds = whole[-1].ended - whole[0].began if whole else 0.0
        return sum(second.tokens for second in whole) / seconds if seconds else 0.0

    @property
    def stage_seconds(self) -> list[list[float]]:
        """Seconds of the window by stage: those busy, then the idle ones in the order of `CAUSES`."""
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
    """Return p50 and p99 of latencies in seconds, in milliseconds; None without any."""
    whole = _latencies()
    for part in parts:
        whole.merge(part)
    return [round(1e3 * whole.quantile(share), 3) if whole.count else None for share in (0.5, 0.99)]


def _stage_seconds(snapshot: Snapshot, now: float) -> list[list[float]]:
    """Return the seconds by stage until now."""
    return [[busy, *idle] for busy, idle in zip(snapshot.busy, snapshot.idle_at(now), strict=True)]
