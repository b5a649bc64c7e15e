"""Sarathi-Serve's stall-free batching (arXiv 2403.02310, Algorithm 3): a budget of tokens, decodes first."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from mypy_extensions import mypyc_attr

from ....conf.policies import TokenBudgetConfig
from ...core.block_pool import BlockPool
from ...core.micro_batch import MicroBatch
from ..base import Scheduler
from ..limits import Limits


@mypyc_attr(allow_interpreted_subclasses=True)
class TokenBudget(Scheduler):
    """All ready decodes first, then partial prompts, then new ones, up to `budget` tokens; several chunks may share it.

    If decodes use up the budget, nothing is admitted. At most B requests.
    """

    def __init__(self, config: TokenBudgetConfig, limits: Limits, pool: BlockPool) -> None:
        super().__init__(config, limits, pool)
        self.max_batched_tokens = config.max_batched_tokens

    def fill(self, batch: MicroBatch) -> None:
        """Take all ready decodes, then prompts up to the remaining budget."""
        self.take_decodes(batch, self.limits.batch)
        self.take_prompts(batch, self.max_batched_tokens - len(batch.decodes))

    def draft_room(self, batch: MicroBatch) -> int:
        """Return the draft tokens that fit up to the tile and the budget."""
        return min(super().draft_room(batch), self.max_batched_tokens - batch.num_tokens)
