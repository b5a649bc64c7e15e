"""The last minute of a server, second by second, for its live page: what happened, in bounded memory."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...runtime.serving.messages import Snapshot

SECONDS = 60
_BINS_PER_E = 50  # a percentile is off by at most 1%
_LEAST_S = 1e-6


class Latencies:
    """Counts latencies in bins on a log scale. One costs less than a microsecond, and takes no memory of its own."""

    __slots__ = ("bins",)

    def __init__(self) -> None:
        self.bins: Counter[int] = Counter()

    def add(self, seconds: float) -> None:
        self.bins[math.floor(math.log(max(seconds, _LEAST_S)) * _BINS_PER_E)] += 1

    def percentile_ms(self, percent: float) -> float | None:
        """The latency below which so many percent lie, in milliseconds; None without any."""
        rank = math.ceil(self.bins.total() * percent / 100)
        for place in sorted(self.bins):
            rank -= self.bins[place]
            if rank <= 0:
                return round(1e3 * math.exp((place + 0.5) / _BINS_PER_E), 3)
        return None


@dataclass(slots=True)
class _Second:
    """What came since the second before ended. The state is that at its end."""

    began: float
    ended: float = math.inf
    tokens: int = 0
    ttft: Latencies = field(default_factory=Latencies)
    tbt: Latencies = field(default_factory=Latencies)
    running: int = 0
    waiting: int = 0
    kv_share: float = 0.0
    stage_seconds: list[list[float]] = field(default_factory=list)

    @property
    def row(self) -> list[float | None]:
        """What the charts show: the time; tokens/s; requests; share of the KV blocks; latencies in ms."""
        percentiles = [each.percentile_ms(percent) for each in (self.ttft, self.tbt) for percent in (50, 99)]
        rate = round(self.tokens / (self.ended - self.began), 1)
        return [round(self.ended, 3), rate, self.running, self.waiting, round(self.kv_share, 4), *percentiles]


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

    def first_token(self, ttft: float) -> None:
        self._newest.tokens += 1
        self._newest.ttft.add(ttft)

    def next_token(self, seconds: float) -> None:
        self._newest.tokens += 1
        self._newest.tbt.add(seconds)

    def end_second(self, snapshot: Snapshot | None, now: float) -> None:
        """End the newest second with the state of the engine."""
        second = self._newest
        second.ended = now
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
        return self._seconds[-1].row

    @property
    def percentiles_ms(self) -> dict[str, list[float | None]]:
        """p50 and p99 over the minute, in milliseconds, None without a value."""
        found = {"ttft": Latencies(), "tbt": Latencies()}
        for second in self._whole:
            found["ttft"].bins.update(second.ttft.bins)
            found["tbt"].bins.update(second.tbt.bins)
        return {name: [each.percentile_ms(50), each.percentile_ms(99)] for name, each in found.items()}

    @property
    def tokens_per_s(self) -> float:
        whole = self._whole
        seconds = whole[-1].ended - whole[0].began if whole else 0.0
        return sum(second.tokens for second in whole) / seconds if seconds else 0.0

    @property
    def means(self) -> dict[str, float]:
        """Of the minute: requests/s by their first tokens, requests running and waiting, KV blocks and their share in
        use."""
        whole = self._whole
        if not whole:
            return {}
        first_tokens = sum(second.ttft.bins.total() for second in whole)
        return {
            "requests_per_s": first_tokens / (whole[-1].ended - whole[0].began),
            "running": sum(second.running for second in whole) / len(whole),
            "waiting": sum(second.waiting for second in whole) / len(whole),
            "kv_share": sum(second.kv_share for second in whole) / len(whole),
            "blocks": self._num_blocks,
        }

    @property
    def ended(self) -> float:
        """When the newest second ended."""
        return self._seconds[-1].ended if self._seconds else self._newest.began

    @property
    def stage_seconds(self) -> list[list[float]]:
        """Seconds of the minute by stage: those busy, then the idle ones in the order of `CAUSES`."""
        if not self._seconds:
            return []
        before, after = self._seconds[0].stage_seconds, self._seconds[-1].stage_seconds
        if not before:
            return after
        return [_minus(late, early) for late, early in zip(after, before, strict=True)]

    @property
    def _whole(self) -> list[_Second]:
        seconds = list(self._seconds)
        return seconds[1:] if len(seconds) > SECONDS else seconds


def _stage_seconds(snapshot: Snapshot, now: float) -> list[list[float]]:
    """Seconds by stage until now."""
    return [[busy, *idle] for busy, idle in zip(snapshot.busy, snapshot.idle_at(now), strict=True)]


def _minus(late: Sequence[float], early: Sequence[float]) -> list[float]:
    return [round(max(0.0, a - b), 6) for a, b in zip(late, early, strict=True)]
