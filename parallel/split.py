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
    """Check that `arch` can be split into `pp` stages of `tp` slices.

    In a simulation of a model with experts, `copies_heads`, several ranks may hold the same KV head.

    Raises:
        ConfigError: it cannot. The error names the key and the values that it may have.
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
    pp: int,
    layers: tuple[int, ...] | None,
    *,
    speeds: Sequence[float] | None = None,
    most: Sequence[int] | None = None,
    times: Sequence[float] | None = None,
) -> list[range]:
    """Return the layers of each stage, as consecutive ranges of layer indices.

    In a balanced split the slowest stage is as fast as possible. Among stages of equal time, if layers are alike, the
    one that needs less memory takes a layer; the embedding and the LM head add to the memory of the first and of the
    last stage.

    Args:
        arch: The model's shape.
        pp: Number of stages.
        layers: Number of layers of each stage. None: a balanced split.
        speeds: Speed of each stage's devices, relative to each other. None: all alike.
        most: Layers that fit into each stage's memory, which a balanced split keeps to where it can. None: no bound.
        times: Time of each layer, the first with the embedding's and the last with the LM head's. None: all alike.
    """
    if layers is None:
        room = most if most is not None and sum(most) >= arch.num_layers and min(most) >= 1 else [arch.num_layers] * pp
        times, speeds = times or [1.0] * arch.num_layers, speeds or [1.0] * pp
        if len(set(times[1:-1])) > 1:
            return _split_by_time(times, speeds, room)
        counts, one = [1] * pp, times[len(times) // 2]
        time, memory = [0.0] * pp, [0.0] * pp
        for stage in (0, -1):  # in quarters of a layer: times are not known better, and memory decides among equal ones
            time[stage] += max(0.0, round(4 * (times[stage] / one - 1)) / 4)
        head = arch.embedding_params / arch.layer_params
        memory[0] += head
        memory[-1] += head if pp > 1 or not arch.tie_embeddings else 0.0
        for _ in range(arch.num_layers - pp):
            open_stages = [s for s in range(pp) if counts[s] < room[s]]
            # The one that is done first with a layer more.
            stage = min(open_stages, key=lambda s: ((time[s] + counts[s] + 1) / speeds[s], memory[s] + counts[s]))
            counts[stage] += 1
    else:
        counts = list(layers)
    assert (len(counts), sum(counts)) == (pp, arch.num_layers), counts
    ends = [sum(counts[: s + 1]) for s in range(pp)]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def _split_by_time(times: Sequence[float], speeds: Sequence[float], room: Sequence[int]) -> list[range]:
    """Return a split whose slowest stage is fastest, of layers that take `times`, and whose stages are much alike.

    Args:
        times: of each layer.
        speeds: of each stage.
        room: most layers of each stage.
    """
    pp, num_layers = len(speeds), len(times)
    before = [0.0, *accumulate(times)]  # time of all layers before one

    def ends(stage: int, first: int) -> range:
        """Return where a stage that begins with a layer may end, one layer being left for each stage after it."""
        return range(first + 1, min(first + room[stage], num_layers - (pp - 1 - stage)) + 1)

    def slowest(stage: int, first: int, end: int) -> float:
        """Return the time of the slowest stage from one on, which has the layers from `first` to `end`."""
        return max((before[end] - before[first]) / speeds[stage], best[stage + 1][end])

    # By stage and layer: the time of the slowest stage, if the layers from this one on are split best among the stages
    # from this one on.
    best = [[inf] * (num_layers + 1) for _ in range(pp)] + [[inf] * num_layers + [0.0]]
    for stage in reversed(range(pp)):
        for first in range(stage, num_layers):
            best[stage][first] = min((slowest(stage, first, end) for end in ends(stage, first)), default=inf)
    bound = best[0][0] * (1 + 1e-9)
    layer, split = 0, []
    for stage in range(pp):
        share = speeds[stage] / sum(speeds[stage:]) * (before[-1] - before[layer])  # of what is left
        target, first = before[layer] + share, layer
        possible = [end for end in ends(stage, first) if slowest(stage, first, end) <= bound]
        layer = min(possible, key=lambda end: abs(before[end] - target))
        split.append(range(first, layer))
    return split
