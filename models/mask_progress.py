"""Tracks an output through its reasoning and an optional trigger text to the part that a grammar constrains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..conf.reasoning import Reasoning
from ..conf.structured_outputs import StructuredOutputs
from .grammar import Grammars

if TYPE_CHECKING:
    import llguidance


class MaskProgress:
    """A request's output, matched up to the token at position `length - 1`.

    Reasoning may come first, then text up to `wanted.after`. Nothing is masked there, except when the reasoning budget
    is used up. Everything after that goes to the matcher.

    Args:
        wanted: the structured outputs to match; None: anything.
        reasoning: the reasoning before them; None: none.
    """

    __slots__ = ("_after", "_detokenizer", "_end_ids", "_grammars", "_reasoned", "_reasoning", "_text", "length",
                 "matcher")  # fmt: skip

    def __init__(
        self, grammars: Grammars, wanted: StructuredOutputs | None, reasoning: Reasoning | None, prompt_len: int
    ) -> None:
        self.matcher: llguidance.LLMatcher | None = None if wanted is None else grammars.matcher(wanted)
        self.length = prompt_len
        self._grammars = grammars
        self._after = "" if wanted is None else wanted.after
        self._reasoning = reasoning
        self._detokenizer = grammars.detokenizer()
        self._text = ""  # may end with a prefix of the awaited text
        self._reasoned = 0  # tokens
        limited = reasoning is not None and reasoning.max_tokens is not None
        self._end_ids = grammars.encode(reasoning.end) if reasoning is not None and limited else []

    @property
    def forced(self) -> int | None:
        """The token that must come next once the reasoning budget is used up; else None."""
        reasoning = self._reasoning
        if reasoning is None or reasoning.max_tokens is None or not self._has_begun(reasoning):
            return None
        place = self._reasoned - reasoning.max_tokens
        return self._end_ids[place] if 0 <= place < len(self._end_ids) else None

    @property
    def is_matching(self) -> bool:
        """Whether the matcher determines the allowed tokens."""
        return self.matcher is not None and self._reasoning is None and not self._after

    def feed(self, start: int, tokens: Sequence[int]) -> None:
        """Process the part of `tokens` that is new. The first of them is at position `start`."""
        assert start <= self.length or not tokens, f"positions {self.length} .. {start - 1} were never fed"
        new = tokens[max(0, self.length - start) :]
        self.length += len(new)
        for token in new:
            if self.is_matching:
                assert self.matcher is not None
                self.matcher.consume_token(token)
            elif self._reasoning is not None or self._after:
                self._look(token)

    def _look(self, token: int) -> None:
        """Look for the awaited texts. The text after the last of them goes to the matcher."""
        self._text += self._detokenizer.push(token)
        if (reasoning := self._reasoning) is not None:
            self._reasoned += 1
            begun = self._text.lstrip()
            if not self._has_begun(reasoning) and not reasoning.begin.startswith(begun[: len(reasoning.begin)]):
                self._reasoning = None  # the output has none
            elif self._has_begun(reasoning) and self._found(reasoning.end):
                self._reasoning = None
            else:
                return
        if not self._after:
            rest = self._text.lstrip()
        elif self._found(self._after):
            rest, self._after = self._text, ""
        else:
            return
        if self.matcher is not None and rest:
            self.matcher.consume_tokens(self._grammars.encode(rest))

    def _has_begun(self, reasoning: Reasoning) -> bool:
        return not reasoning.begin or self._text.lstrip().startswith(reasoning.begin)

    def _found(self, text: str) -> bool:
        """Return whether a text has appeared, and keep the text after it; otherwise keep the possible prefix."""
        before, found, behind = self._text.partition(text)
        if found:
            self._text = behind
        elif self._reasoning is None or not self._reasoning.begin:
            self._text = before[-len(text) :]
        return bool(found)
