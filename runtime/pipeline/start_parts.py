"""The parts of a startup: each rank reports their durations, and the coordinator names the slowest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from .handshake import StartPart

READY = "ranks are ready after"  # prefix of a startup's last line
_SIGN_S = 1.0  # minimum interval between signs of life


class PartTimer:
    """Times the parts of a rank's startup, one after the other.

    Args:
        rank: the rank.
        send: sends a message to the coordinator.
        since: start of the first part, on the monotonic clock.
    """

    def __init__(self, rank: int, send: Callable[[StartPart], None], since: float) -> None:
        self._rank, self._send = rank, send
        self._since = self._reported = since

    def report(self, part: str, is_done: bool) -> float:
        """Report that a part has finished or, at most once per second, is running. Return its seconds so far."""
        now = time.monotonic()
        seconds = now - self._since
        if is_done or now > self._reported + _SIGN_S:
            self._reported = now
            self._send(StartPart(self._rank, part, seconds, is_done))
        if is_done:
            self._since = now
        return seconds


class StartParts:
    """The startup parts that ranks have reported, and the time of the last sign of life from any rank.

    Args:
        now: when the startup began, on the coordinator's clock.
    """

    def __init__(self, now: float) -> None:
        self.last_sign = now
        self._last: dict[int, dict[str, StartPart]] = {}  # by rank and part

    def take(self, message: StartPart) -> None:
        """Keep a rank's report."""
        self._last.setdefault(message.rank, {})[message.part] = message

    def of(self, ranks: Iterable[int]) -> str:
        """Format the durations of some ranks' parts."""
        parts = {rank: self._last.get(rank, {}).values() for rank in ranks}
        return "; ".join(f"rank {rank}: {', '.join(map(_words, own))}" for rank, own in parts.items() if own)

    def slowest(self) -> str:
        """Format each part's duration on its slowest rank."""
        longest: dict[str, StartPart] = {}
        for parts in self._last.values():
            for name, part in parts.items():
                longest[name] = max(longest.get(name, part), part, key=lambda each: each.seconds)
        return ", ".join(f"{_words(part)} (rank {part.rank})" for part in longest.values())


def _words(part: StartPart) -> str:
    return f"{part.part} {part.seconds:.1f} s{'' if part.is_done else ' so far'}"
