"""The parts of a start: a rank tells what each took, the coordinator says it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from .handshake import StartPart

_SIGN_S = 1.0  # between two signs of life, at least


class PartTimer:
    """Times the parts of a rank's start, one after the other.

    Args:
        rank: the rank.
        send: sends word to the coordinator.
        since: when the first part began, on the monotonic clock.
    """

    def __init__(self, rank: int, send: Callable[[StartPart], None], since: float) -> None:
        self._rank, self._send = rank, send
        self._since = self._told = since

    def tell(self, part: str, is_done: bool) -> float:
        """Tell that a part has ended, or, at most once a second, that it goes on. Returns its seconds so far."""
        now = time.monotonic()
        seconds = now - self._since
        if is_done or now > self._told + _SIGN_S:
            self._told = now
            self._send(StartPart(self._rank, part, seconds, is_done))
        if is_done:
            self._since = now
        return seconds


class StartParts:
    """What the ranks have told of a start, and when the last of them gave a sign of life.

    Args:
        now: when the start began, on the coordinator's clock.
    """

    def __init__(self, now: float) -> None:
        self.last_sign = now
        self._last: dict[int, dict[str, StartPart]] = {}  # by rank and part

    def take(self, message: StartPart) -> None:
        """Take note of a rank's word."""
        self._last.setdefault(message.rank, {})[message.part] = message

    def of(self, ranks: Iterable[int]) -> str:
        """Say what the parts of some ranks took."""
        parts = {rank: self._last.get(rank, {}).values() for rank in ranks}
        return "; ".join(f"rank {rank}: {', '.join(map(_words, told))}" for rank, told in parts.items() if told)

    def slowest(self) -> str:
        """Say what each part took on the rank where it took longest."""
        longest: dict[str, StartPart] = {}
        for told in self._last.values():
            for part, word in told.items():
                longest[part] = max(longest.get(part, word), word, key=lambda each: each.seconds)
        return ", ".join(f"{_words(word)} (rank {word.rank})" for word in longest.values())


def _words(word: StartPart) -> str:
    return f"{word.part} {word.seconds:.1f} s{'' if word.is_done else ' so far'}"
