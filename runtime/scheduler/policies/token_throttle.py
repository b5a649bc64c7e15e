"""gLLM's token throttling (arXiv 2504.14775): separate bounds for prefill and decode tokens of a micro-batch."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from mypy_extensions import mypyc_attr

from ....conf.policies import TokenThrottleConfig
from ...core.block_pool import BlockPool
from ...core.micro_batch import MicroBatch
from ..base import Scheduler
from ..limits import Limits


@mypyc_attr(allow_interpreted_subclasses=True)
class TokenThrottle(Scheduler):
    """Prefill tokens follow the backlog and the free KV cache; decodes are spread evenly over the depth.

    Prefill budget: min(backlog / `iterations`, free share of the KV cache above the reserve x `max_prefill_tokens`),
    but at least `min_prefill_tokens`. Decode budget: (ready + in flight) / depth, the remainder round robin. At most B
    requests.
    """

    def __init__(self, config: TokenThrottleConfig, limits: Limits, pool: BlockPool) -> None:
        super().__init__(config, limits, pool)
        self.config = config

    def fill(self, batch: MicroBatch) -> None:
        """Take an even share of the decodes, and prompts up to the throttled budget."""
        self.take_decodes(batch, min(self.decode_share, self.limits.batch))
        self.take_prompts(batch, self.prefill_budget)
        if not batch:
            self.take_decodes(batch, 1)  # no decode of this micro-batch's share is ready

    @property
    def prefill_budget(self) -> int:
        """Prompt tokens of the next micro-batch."""
        config = self.config
        free = self.pool.num_free / self.pool.num_blocks
        above_reserve = max(0.0, free - config.kv_reserve) / (1.0 - config.kv_reserve)
        by_backlog = -(-self.backlog // config.iterations)
        return max(config.min_prefill_tokens, min(by_backlog, int(above_reserve * config.max_prefill_tokens)))
