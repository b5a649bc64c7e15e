"""Finds stop strings in streamed text."""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    """Ends one request's text at the first stop string, and holds back text that may be the start of one.

    The stop string that completes first wins, the longest if several end at once, so that the text does not depend on
    how it is split into pieces. One Knuth-Morris-Pratt automaton per stop string: amortized O(1) per character.
    """

    def __init__(self, stop: Sequence[str], include_stop: bool = False) -> None:
        assert all(stop), stop
        self.stop_string: str | None = None  # the one that was found
        self._include_stop = include_stop
        self._stop = sorted(stop, key=len, reverse=True)
        self._fallbacks = [_fallback(s) for s in self._stop]
        self._matched = [0] * len(self._stop)  # characters matched so far, per stop string
        self._held = ""

    def push(self, text: str, active: bool = True) -> tuple[str, bool]:
        """Add the next piece; return the text that may be shown, and whether a stop string was found.

        Text after a stop string is dropped.

        While not `active` (before `min_tokens`), text passes through; stop strings that start in it are not found.
        """
        if self.stop_string is not None:
            return "", True
        if not self._stop:
            return text, False
        if not active:
            assert not self._held, "stop strings were active before"
            return text, False
        pending = self._held + text
        for end, char in enumerate(text, len(self._held) + 1):
            if (found := self._step(char)) is not None:
                self.stop_string, self._held = found, ""
                return pending[: end if self._include_stop else end - len(found)], True
        keep = len(pending) - max(self._matched)
        self._held = pending[keep:]
        return pending[:keep], False

    def flush(self) -> str:
        """Return the text that is still held back, at the end of the output."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> str | None:
        found = None
        for i, (stop, fallback) in enumerate(zip(self._stop, self._fallbacks, strict=True)):
            n = self._matched[i]
            while n and stop[n] != char:
                n = fallback[n - 1]
            self._matched[i] = n = n + (stop[n] == char)
            if n == len(stop) and found is None:
                found = stop
        return found


def _fallback(stop: str) -> list[int]:
    """Return, for each prefix of a stop string, the length of its longest proper prefix that it also ends with."""
    lengths = [0] * len(stop)
    n = 0
    for i in range(1, len(stop)):
        while n and stop[i] != stop[n]:
            n = lengths[n - 1]
        n += stop[i] == stop[n]
        lengths[i] = n
    return lengths
