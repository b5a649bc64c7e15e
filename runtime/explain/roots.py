"""What made a run longer: where idle time begins, beyond the ledger's cause, and what made compute longer."""

from __future__ import annotations

from enum import StrEnum


class Root(StrEnum):
    """What made a run longer than the same devices could be."""

    SLOW_STAGE = "slow_stage"  # one stage takes longer than the others throughout
    UNEVEN_LAYERS = "uneven_layers"  # the same, and it has more layers
    LM_HEAD = "lm_head"  # the same on the last stage, for micro-batches that sample many tokens
    STRAGGLER = "straggler"  # one stage takes longer than it usually does, for a while
    CHANCE = "chance"  # the times of like micro-batches vary
    MICRO_BATCHES = "micro_batches"  # they differ: PB1 to PB3, and lengths of prefixes
    POLICY = "policy"  # another policy deals the same requests into micro-batches that take less
    LARGE_CHUNK = "large_chunk"  # micro-batches with prompts take much longer than the others
    DEPTH = "depth"  # fewer micro-batches are in flight than there are stages
    TRANSPORT = "transport"
    CONTROL = "control"
    FEW_REQUESTS = "few_requests"  # none is there, or all are in flight
    KV_FULL = "kv_full"
    RECOVERY = "recovery"
    OVERLOAD = "overload"  # more requests came than were served, so that the queue grew
    SMALL_CHUNK = "small_chunk"  # compute: micro-batches of prompts that are too small for the devices
    SMALL_BATCH = "small_batch"  # compute: decodes of few requests, for which all weights are read
    TENSOR_PARALLEL = "tensor_parallel"  # compute: sums of a stage's ranks on several nodes
    LONG_PROMPTS = "long_prompts"  # few prompts are much longer than the others
    PREEMPTION = "preemption"  # compute: tokens that were computed again
    CONTENTION = "contention"  # ranks waited for a processor
    SLOW_COMPUTE = "slow_compute"  # compute: far from the rates that the machine gives

    @property
    def least(self) -> float:
        """The share of a run below which it is not worth mending: engines usually lose that, or runs differ by it."""
        return _LEAST.get(self, 0.03)


TUNING = (Root.SMALL_CHUNK, Root.LARGE_CHUNK, Root.POLICY, Root.SMALL_BATCH, Root.DEPTH, Root.LM_HEAD)  # settings
_LEAST = {
    **dict.fromkeys((*TUNING, Root.CHANCE, Root.STRAGGLER), 0.05),
    **dict.fromkeys((Root.POLICY, Root.FEW_REQUESTS, Root.TRANSPORT, Root.CONTROL), 0.08),
    Root.CONTENTION: 0.09,  # a single request with a core for each rank loses 0.08 to the coordinator
    Root.MICRO_BATCHES: 0.25,  # a bound that no policy reaches
}
