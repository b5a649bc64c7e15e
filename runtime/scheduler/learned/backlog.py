"""The backlog of prompt tokens: whether it is long, so that only throughput shortens the wait."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

LONG_ROUNDS = 32  # rounds of chunks through the pipeline that make a backlog long
SHORT_ROUNDS = 8  # rounds that make it short again: prompts can wait a little


class Backlog:
    """Knows whether the backlog is long. Once long, it stays so until it is clearly short."""

    def __init__(self) -> None:
        self.is_long = False

    def observe(self, num_tokens: int, tokens_a_round: int) -> None:
        """Take note of `num_tokens` of prompts not yet dispatched; a round dispatches up to `tokens_a_round`."""
        self.is_long = num_tokens > (SHORT_ROUNDS if self.is_long else LONG_ROUNDS) * tokens_a_round
