"""Whether so many prompts wait that throughput is what makes them wait less."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

_ROUNDS = 32  # of chunks through the pipeline that are still to be dispatched make a long backlog
FEW = 8  # of them, and no more: prompts can wait a little


class Backlog:
    """Long once, it stays so until it is clearly short."""

    def __init__(self) -> None:
        self.is_long = False

    def observe(self, tokens: int, per_round: int) -> None:
        """So many prompt `tokens` are still to be dispatched, at most `per_round` in each round of the pipeline."""
        self.is_long = tokens > (FEW if self.is_long else _ROUNDS) * per_round
