"""Prompt lookup (n-gram speculation): drafts the tokens that followed the same n-gram earlier in the request."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from array import array
from collections.abc import Sequence

LONGEST = 3  # tokens of the n-gram that is tried first
SHORTEST = 2
_BYTES = 4  # per token


class PromptLookup:
    """The tokens of one request so far, prompt and output, for n-gram lookup.

    The method is prompt lookup decoding (Apoorv Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding). The
    latest match wins, as nearby text is the most likely to repeat. A guess that reaches the end continues with its own
    tokens, so that it follows a loop of any period.
    """

    def __init__(self) -> None:
        self._tokens = bytearray()

    def __len__(self) -> int:
        return len(self._tokens) // _BYTES

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens of the prompt or the output."""
        self._tokens += array("i", list(tokens)).tobytes()

    def guess(self, most: int) -> tuple[int, list[int]]:
        """Guess the next `most` tokens.

        Returns:
            The length of the longest n-gram with an earlier match, and the draft tokens; 0 and none if no n-gram of at
            least `SHORTEST` tokens has a match.
        """
        tokens = self._tokens
        end = len(tokens)
        for n in range(LONGEST, SHORTEST - 1, -1):
            size = n * _BYTES
            if end <= size:
                continue
            gram = tokens[end - size :]
            at = tokens.rfind(gram, 0, end - _BYTES)
            while at >= 0 and at % _BYTES:  # not aligned to a token
                at = tokens.rfind(gram, 0, at + size - 1)
            if at >= 0:
                followed = array("i", bytes(tokens[at + size : at + size + most * _BYTES])).tolist()
                return n, [followed[place % len(followed)] for place in range(most)]
        return 0, []
