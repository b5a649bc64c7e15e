"""Where idle time begins, beyond the ledger's cause, which says what a stage waited for."""

from __future__ import annotations

from enum import StrEnum


class Root(StrEnum):
    """Where idle time begins."""

    SLOW_STAGE = "slow_stage"  # one stage takes longer than the others throughout
    UNEVEN_LAYERS = "uneven_layers"  # the same, and it has more layers
    LM_HEAD = "lm_head"  # the same on the last stage, for micro-batches that sample many tokens
    STRAGGLER = "straggler"  # one stage takes longer than it usually does, for a while
    CHANCE = "chance"  # the times of like micro-batches vary
    MICRO_BATCHES = "micro_batches"  # they differ: PB1 to PB3, and lengths of prefixes
    DEPTH = "depth"  # fewer micro-batches are in flight than there are stages
    TRANSPORT = "transport"
    CONTROL = "control"
    DEALING = "dealing"  # the policy puts requests into fewer micro-batches than there are stages, or admits few
    FEW_REQUESTS = "few_requests"  # none is there, or all are in flight
    KV_FULL = "kv_full"
    RECOVERY = "recovery"
    FILL_DRAIN = "fill_drain"
