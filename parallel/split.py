"""Splits a model's layers among the pipeline stages, and checks that the model can be split. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from math import inf

from ..conf.architecture import Architecture
from ..conf.errors import ConfigError
from ..conf.schema import ParallelConfig


def check_parallel(arch: Architecture, parallel: ParallelConfig, *, copies_heads: bool = False) -> None:
    """Check that `arch` can be split into `pp` stages with `tp` shards each.

    With `copies_heads` (simulations of MoE models), several ranks may have the same KV head.

    Raises:
        ConfigError: it cannot. The error names the key and its valid values.
    """
    pp, tp, layers = parallel.pp, parallel.tp, parallel.layers
    if pp > arch.num_layers:
        raise ConfigError(f"parallel.pp={pp}: must be at most the model's {arch.num_layers} layers")
    if isinstance(layers, tuple) and sum(layers) != arch.num_layers:
        raise ConfigError(
            f"parallel.layers={list(layers)}: must sum to the model's {arch.num_layers} layers, not {sum(layers)}"
        )
    if parallel.expert_parallel and arch.experts is None:
        raise ConfigError("parallel.expert_parallel=true: must be false for a model without experts")
    sizes = {"attention heads": arch.num_heads}
    may_copy = copies_heads and arch.experts is not None and tp % arch.num_kv_heads == 0
    if arch.latent is None and not may_copy:
        sizes["KV heads"] = arch.num_kv_heads
    if arch.expert_layers < arch.num_layers:
        sizes["feed-forward size"] = arch.ffn_size
    if arch.experts is not None:
        whole = parallel.expert_parallel
        sizes["experts" if whole else "experts' size"] = arch.experts.num_experts if whole else arch.expert_size
        sizes["shared expert's size"] = arch.experts.shared_ffn_size
    common = math.gcd(*sizes.values())
    fitting = " or ".join(str(size) for size in range(1, common + 1) if common % size == 0)
    for what, size in sizes.items():
        if size % tp:
            raise ConfigError(
                f"parallel.tp={tp}: must divide the model's {what}, {size}; tp may be {fitting}, parallel.pp any number"
                f" up to {arch.num_layers}"
            )


def split_layers(
    arch: Architecture,
    num_stages: int,
    layers: tuple[int, ...] | None,
    *,
    speeds: Sequence[float] | None = None,
    most: Sequence[int] | None = None,
    times: Sequence[float] | None = None,
) -> list[range]:
    """Return the layers of each stage, as consecutive ranges of layer indices.

    In a balanced split the slowest stage is as fast as possible. Among stages of equal time, if layers are alike, the
    stage that needs less memory takes the next layer; the embedding and the LM head add to the memory of the first and
    the last stage.

    Args:
        arch: The model's shape.
        num_stages: Number of stages.
        layers: Number of layers of each stage. None: a balanced split.
        speeds: Relative speed of each stage's devices. None: all equal.
        most: Layers that fit into each stage's memory, which a balanced split respects if possible. None: no limit.
        times: Time of each layer; the first includes the embedding, the last the LM head. None: all equal.
    """
    if layers is None:
        whole = [arch.num_layers] * num_stages
        room = most if most is not None and sum(most) >= arch.num_layers and min(most) >= 1 else whole
        times, speeds = times or [1.0] * arch.num_layers, speeds or [1.0] * num_stages
        if len(set(times[1:-1])) > 1:
            return _split_by_time(times, speeds, room)
        counts, one = [1] * num_stages, times[len(times) // 2]
        time, memory = [0.0] * num_stages, [0.0] * num_stages
        for stage in (0, -1):  # in quarters of a layer: times are no more precise, and memory breaks ties
            time[stage] += max(0.0, round(4 * (times[stage] / one - 1)) / 4)
        head = arch.embedding_params / arch.layer_params
        memory[0] += head
        memory[-1] += head if num_stages > 1 or not arch.tie_embeddings else 0.0
        for _ in range(arch.num_layers - num_stages):
            open_stages = [s for s in range(num_stages) if counts[s] < room[s]]
            # The stage that would finish first with one more layer.
            stage = min(open_stages, key=lambda s: ((time[s] + counts[s] + 1) / speeds[s], memory[s] + counts[s]))
            counts[stage] += 1
    else:
        counts = list(layers)
    assert (len(counts), sum(counts)) == (num_stages, arch.num_layers), counts
    ends = [sum(counts[: s + 1]) for s in range(num_stages)]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def _split_by_time(times: Sequence[float], speeds: Sequence[float], room: Sequence[int]) -> list[range]:
    """Return a split that minimizes the time of the slowest stage and keeps the stages similar.

    Args:
        times: time of each layer.
        speeds: relative speed of each stage.
        room: maximum number of layers per stage.
    """
    num_stages, num_layers = len(speeds), len(times)
    before = [0.0, *accumulate(times)]  # time of all layers before one

    def ends(stage: int, first: int) -> range:
        """Return the possible ends of a stage that starts at layer `first`, leaving a layer for each later stage."""
        return range(first + 1, min(first + room[stage], num_layers - (num_stages - 1 - stage)) + 1)

    def slowest(stage: int, first: int, end: int) -> float:
        """Return the time of the slowest stage from `stage` on, if `stage` has the layers `first` to `end` - 1."""
        return max((before[end] - before[first]) / speeds[stage], best[stage + 1][end])

    # By stage and layer: the slowest stage's time in the best split of the remaining layers over the remaining stages.
    best = [[inf] * (num_layers + 1) for _ in range(num_stages)] + [[inf] * num_layers + [0.0]]
    for stage in reversed(range(num_stages)):
        for first in range(stage, num_layers):
            best[stage][first] = min((slowest(stage, first, end) for end in ends(stage, first)), default=inf)
    bound = best[0][0] * (1 + 1e-9)
    layer, split = 0, []
    for stage in range(num_stages):
        share = speeds[stage] / sum(speeds[stage:]) * (before[-1] - before[layer])  # of the remaining time
        target, first = before[layer] + share, layer
        possible = [end for end in ends(stage, first) if slowest(stage, first, end) <= bound]
        layer = min(possible, key=lambda end: abs(before[end] - target))
        split.append(range(first, layer))
    return split
