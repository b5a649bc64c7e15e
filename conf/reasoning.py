"""Reasoning delimiters and budget: `sampling.reasoning`."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import check


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """Delimiters of an output's reasoning. Structured outputs apply to the text after it.

    Raises:
        ConfigError: a value is out of its range.
    """

    begin: str = ""
    """opening delimiter; empty: the prompt already contains it"""
    end: str = "</think>"
    """closing delimiter"""
    max_tokens: int | None = None
    """reasoning budget in tokens, after which `end` is forced; null: no limit"""

    def __post_init__(self) -> None:
        check("sampling.reasoning.begin", self.begin, isinstance(self.begin, str), "a string")
        check("sampling.reasoning.end", self.end, isinstance(self.end, str) and bool(self.end), "a non-empty string")
        is_number = type(self.max_tokens) is int and self.max_tokens >= 0
        check("sampling.reasoning.max_tokens", self.max_tokens, self.max_tokens is None or is_number, "null, 0 or more")
