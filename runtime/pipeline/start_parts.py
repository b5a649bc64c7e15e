"""The parts of a start: each rank reports how long they take, and the coordinator names the slowest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from .handshake import StartPart

READY = "ranks are ready after"  # begins the line that ends a start
_SIGN_S = 1.0  # between two signs of life, at least


class PartTimer:
    """Times the parts of a rank's start, one after the other.

    Args:
        rank: the rank.
        send: sends a message to the coordinator.
        since: when the first part began, on the monotonic clock.
    """

    def __init__(self, rank: int, send: Callable[[StartPart], None], since: float) -> None:
        self._rank, self._send = rank, send
        self._since = self._reported = since

    def report(self, part: str, is_done: bool) -> float:
        """Report that a part has ended, or, at most once a second, that it goes on. Returns its seconds so far."""
        now = time.monotonic()
        seconds = now - self._since
        if is_done or now > self._reported + _SIGN_S:
            self._reported = now
            self._send(StartPart(self._rank, part, seconds, is_done))
        if is_done:
            self._since = now
        return seconds


class StartParts:
    """The parts of a start that ranks have reported, and when the last sign of life came from any of them.

    Args:
        now: when the start began, on the coordinator's clock.
    """

    def __init__(self, now: float) -> None:
        self.last_sign = now
        self._last: dict[int, dict[str, StartPart]] = {}  # by rank and part

    def take(self, message: StartPart) -> None:
        """Keep a rank's report."""
        self._last.setdefault(message.rank, {})[message.part] = message

    def of(self, ranks: Iterable[int]) -> str:
        """Say what the parts of some ranks took."""
        parts = {rank: self._last.get(rank, {}).values() for rank in ranks}
        return "; ".join(f"rank {rank}: {', '.join(map(_words, own))}" for rank, own in parts.items() if own)

    def slowest(self) -> str:
        """Say what each part took on the rank where it took longest."""
        longest: dict[str, StartPart] = {}
        for parts in self._last.values():
            for name, part in parts.items():
                longest[name] = max(longest.get(name, part), part, key=lambda each: each.seconds)
        return ", ".join(f"{_words(part)} (rank {part.rank})" for part in longest.values())


def _words(part: StartPart) -> str:
    return f"{part.part} {part.seconds:.1f} s{'' if part.is_done else ' so far'}"
