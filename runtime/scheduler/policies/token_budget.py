"""Sarathi-Serve's stall-free batching (arXiv 2403.02310, Algorithm 3): a budget of tokens, decodes first."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from mypy_extensions import mypyc_attr

from ....conf.policies import TokenBudgetConfig
from ...core.block_pool import BlockPool
from ...core.micro_batch import MicroBatch
from ..base import Limits, Scheduler


@mypyc_attr(allow_interpreted_subclasses=True)
class TokenBudget(Scheduler):
    """All ready decodes first, then partial prompts, then new ones, up to `budget` tokens; several chunks may share it.

    Where decodes use the budget up, nothing is admitted. B requests at most.
    """

    def __init__(self, config: TokenBudgetConfig, limits: Limits, pool: BlockPool) -> None:
        super().__init__(config, limits, pool)
        self.budget = config.budget

    def fill(self, batch: MicroBatch) -> None:
        """Take all decodes that are ready, then prompts up to what they leave of the budget."""
        self.take_decodes(batch, self.limits.batch)
        self.take_prompts(batch, self.budget - len(batch.decodes))

    def draft_room(self, batch: MicroBatch) -> int:
        """Return the tokens up to the tile and the budget."""
        return min(super().draft_room(batch), self.budget - batch.num_tokens)
