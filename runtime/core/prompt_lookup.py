"""Prompt lookup: guesses a request's next tokens from what followed the same n-gram earlier in it."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from array import array
from collections.abc import Sequence

LONGEST = 3  # tokens of the n-gram that is looked up first
SHORTEST = 2
_BYTES = 4  # of a token


class PromptLookup:
    """The tokens of one request so far, prompt and output, to look n-grams up in.

    The method is prompt lookup decoding (Apoorv Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding). Of
    several places the latest counts, as the text nearby is the likeliest to be repeated. A guess that reaches the end
    goes on with its own tokens, so that a loop of any period is followed as far as is asked for.
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
            The length of the n-gram that was found earlier, the longest one, and the tokens; 0 and none if no n-gram of
            `SHORTEST` tokens or more was there before.
        """
        tokens = self._tokens
        end = len(tokens)
        for n in range(LONGEST, SHORTEST - 1, -1):
            size = n * _BYTES
            if end <= size:
                continue
            gram = tokens[end - size :]
            at = tokens.rfind(gram, 0, end - _BYTES)
            while at >= 0 and at % _BYTES:  # across the bounds of tokens
                at = tokens.rfind(gram, 0, at + size - 1)
            if at >= 0:
                followed = array("i", bytes(tokens[at + size : at + size + most * _BYTES])).tolist()
                return n, [followed[place % len(followed)] for place in range(most)]
        return 0, []
