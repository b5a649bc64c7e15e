"""What of an output is reasoning: `sampling.reasoning`."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import check


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """Where an output's reasoning begins and ends. Structured outputs match what comes after it.

    Raises:
        ConfigError: a value is out of its range.
    """

    begin: str = ""
    """text with which an output that reasons begins; empty: the prompt has begun the reasoning"""
    end: str = "</think>"
    """text with which it ends"""
    max_tokens: int | None = None
    """tokens after which `end` is written, if the model has not come to it; null: any number"""

    def __post_init__(self) -> None:
        check("sampling.reasoning.begin", self.begin, isinstance(self.begin, str), "a text")
        check("sampling.reasoning.end", self.end, isinstance(self.end, str) and bool(self.end), "a text, not empty")
        is_number = type(self.max_tokens) is int and self.max_tokens >= 0
        check("sampling.reasoning.max_tokens", self.max_tokens, self.max_tokens is None or is_number, "null, 0 or more")
