"""Which stage holds which layers, and whether a model can be split so at all. No torch."""

from __future__ import annotations

from ..conf.errors import ConfigError
from ..conf.schema import Architecture, ParallelConfig

# The head runs only for rows that sample a token: its weights are read once a micro-batch like any layer's, but it
# computes for a tenth of the rows or less where chunks fill a micro-batch. A quarter lies between the two.
_HEAD_WEIGHT = 0.25


def check_parallel(arch: Architecture, parallel: ParallelConfig) -> None:
    """Whether `arch` can be cut into `pp` stages of `tp` slices.

    Raises:
        ConfigError: naming the key and what would be right.
    """
    pp, tp, layers = parallel.pp, parallel.tp, parallel.layers
    if pp > arch.num_layers:
        raise ConfigError(f"parallel.pp={pp}: must be at most the model's {arch.num_layers} layers")
    if layers is not None and sum(layers) != arch.num_layers:
        raise ConfigError(
            f"parallel.layers={list(layers)}: must sum to the model's {arch.num_layers} layers, not {sum(layers)}"
        )
    for what, size in (("attention heads", arch.num_heads), ("KV heads", arch.num_kv_heads),
                       ("feed-forward size", arch.ffn_size)):
        if size % tp:
            raise ConfigError(f"parallel.tp={tp}: must divide the model's {what}, {size}")


def split_layers(arch: Architecture, pp: int, layers: tuple[int, ...] | None) -> list[range]:
    """The layers of each stage, as ranges of global indices that follow each other.

    `layers` gives the counts; None balances them: the slowest stage is as fast as can be, the head weighed in on the
    last stage; among equals the one with less memory takes a layer, the embedding weighed in on the first.
    """
    if layers is None:
        counts = [1] * pp
        time, memory = [0.0] * pp, [0.0] * pp
        head = arch.embedding_params / arch.layer_params
        memory[0] += head
        memory[-1] += head if pp > 1 or not arch.tie_embeddings else 0.0
        time[-1] += _HEAD_WEIGHT * head
        for _ in range(arch.num_layers - pp):
            stage = min(range(pp), key=lambda s: (time[s] + counts[s], memory[s] + counts[s]))
            counts[stage] += 1
    else:
        counts = list(layers)
    assert (len(counts), sum(counts)) == (pp, arch.num_layers), counts
    ends = [sum(counts[: s + 1]) for s in range(pp)]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
