"""Root causes of a longer run: what idle time originates from, beyond the ledger's cause, and what slowed compute."""

from __future__ import annotations

from enum import StrEnum


class Root(StrEnum):
    """Why a run took longer than it could have on the same devices."""

    SLOW_STAGE = "slow_stage"  # one stage takes longer than the others throughout
    UNEVEN_LAYERS = "uneven_layers"  # a slow stage that has more layers
    LM_HEAD = "lm_head"  # a slow last stage, in micro-batches that sample many tokens
    STRAGGLER = "straggler"  # one stage takes longer than it usually does, for a while
    CHANCE = "chance"  # the times of similar micro-batches vary
    MICRO_BATCHES = "micro_batches"  # micro-batches differ: PB1 to PB3, and prefix lengths
    POLICY = "policy"  # another policy packs the same requests into faster micro-batches
    LARGE_CHUNK = "large_chunk"  # micro-batches with prompts take much longer than the others
    DEPTH = "depth"  # fewer micro-batches are in flight than there are stages
    TRANSPORT = "transport"
    CONTROL = "control"
    FEW_REQUESTS = "few_requests"  # there are none, or all are in flight
    KV_FULL = "kv_full"
    RECOVERY = "recovery"
    OVERLOAD = "overload"  # requests arrived faster than they were served, so that the queue grew
    SMALL_CHUNK = "small_chunk"  # compute: prefill micro-batches that are too small for the devices
    SMALL_BATCH = "small_batch"  # compute: decodes of few requests, for which all weights are read
    TENSOR_PARALLEL = "tensor_parallel"  # compute: all-reduces of a stage's ranks across nodes
    LONG_PROMPTS = "long_prompts"  # few prompts are much longer than the others
    PREEMPTION = "preemption"  # compute: tokens that were recomputed
    CONTENTION = "contention"  # ranks waited for a processor
    SLOW_COMPUTE = "slow_compute"  # compute: far below the machine's rates

    @property
    def least(self) -> float:
        """The least share of a run for it to be worth fixing, given usual losses and variation between runs."""
        return _LEAST.get(self, 0.03)


TUNING = (Root.SMALL_CHUNK, Root.LARGE_CHUNK, Root.POLICY, Root.SMALL_BATCH, Root.DEPTH, Root.LM_HEAD)  # settings
_LEAST = {
    **dict.fromkeys((*TUNING, Root.CHANCE, Root.STRAGGLER), 0.05),
    **dict.fromkeys((Root.POLICY, Root.FEW_REQUESTS, Root.TRANSPORT, Root.CONTROL), 0.08),
    Root.CONTENTION: 0.09,  # a single request with one core per rank loses 0.08 to the coordinator
    Root.MICRO_BATCHES: 0.25,  # a bound that no policy reaches
}
