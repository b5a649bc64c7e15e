"""Splits a run's layers over its stages: by their times and the stages' speeds, within the memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from ...conf.schema import EngineConfig, HardwareConfig, ParallelConfig
from ...models.memory import MemoryModel
from ...parallel.split import split_layers
from .layer_times import find_layer_times

# KV tokens per stage that a layer split by stage speed must leave room for. With less, too few sequences run to keep
# the stages busy. In simulations of Llama-2 70B and LLaMA 33B over an A100 or A6000 and an H100 or H200, `sarathi` is
# within 4% of the fastest split with this value. With room for one context (4,096 or 2,048 tokens) it takes up to 2.2
# times as long, and with 65,536 tokens up to 1.07 times.
_KV_TOKENS_A_STAGE = 16_384


def balanced_layers(config: EngineConfig, memory: MemoryModel, stages: Sequence[HardwareConfig]) -> list[range]:
    """Return the layers of each stage, balanced by time within the memory limits."""
    arch, pp, speeds = memory.arch, config.parallel.pp, _speeds(config.parallel, stages)
    counts = config.parallel.layer_counts(arch.num_layers)
    if counts is not None or pp == 1:
        return split_layers(arch, pp, counts)
    assert memory.formats is not None, "a plan knows them"
    times = None
    if (layer_times := find_layer_times()) is not None:
        times = layer_times(config, arch, memory.formats, memory.dtype_bytes, memory.replicates_embedding())
    layers = split_layers(arch, pp, None, speeds=speeds, times=times)
    found = [len(each) for each in layers]
    if len({each.memory_gib for each in stages}) > 1 or max(found) - min(found) > 1:
        layers = split_layers(arch, pp, None, speeds=speeds, most=_most_layers(memory, config), times=times)
    return layers


def _speeds(parallel: ParallelConfig, stages: Sequence[HardwareConfig]) -> list[float] | None:
    """Return the relative speed of each stage; None if all are equal or one is unknown."""
    speeds = list(parallel.stage_speeds) if parallel.stage_speeds is not None else [each.speed for each in stages]
    known = [speed for speed in speeds if speed is not None]
    return known if len(known) == len(speeds) and len(set(known)) > 1 else None


def _most_layers(memory: MemoryModel, config: EngineConfig) -> list[int]:
    """Return how many layers each stage may have so that the KV cache gets enough blocks.

    Enough is `cache.num_blocks`, or else `_KV_TOKENS_A_STAGE` tokens per stage, and at least one sequence of full
    context length. If no split leaves that much room, it is the most that any split leaves.
    """

    def most(num_blocks: int) -> list[int]:
        return memory.most_layers(num_blocks * config.block_size)

    if config.cache.num_blocks is not None:
        return most(config.cache.num_blocks)
    least = -(-memory.arch.max_position // config.block_size)
    wanted = max(least, config.parallel.pp * _KV_TOKENS_A_STAGE // config.block_size)
    too_many = bisect_left(
        range(least + 1, wanted + 1), True, key=lambda num_blocks: sum(most(num_blocks)) < memory.arch.num_layers
    )
    return most(least + too_many)
