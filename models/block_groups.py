"""Groups of layers that share a block table, so that blocks outside a sliding window can be freed.

A block id represents the keys and values of `block_size` tokens in the layers of one group. On each stage every id has
memory for as many layers as the stage's largest group. So one pool serves all groups, and ids are the same on every
stage. vLLM's hybrid KV cache manager groups layers in this way.

This file imports no torch.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product

from ..conf.architecture import Architecture

Windows = tuple[int | None, ...]  # per group; None: full attention
ONE_TABLE: Windows = (None,)  # for all layers: no block is freed before its request ends

_MOST_GROUPS = 8  # each has its own table, in the coordinator and on each rank
_FEW_KINDS = 3  # up to this many window sizes, all numbers of groups are tried
_WORTH = 1.05  # more groups must save 5% of the memory


def most_blocks(window: int | None, block_size: int) -> int:
    """Return the maximum blocks reserved for a request in a group: its window, and as many tokens ahead."""
    return sys.maxsize if window is None else -(-(2 * window - 1) // block_size) + 1


def blocks_held(num_tokens: int, windows: Windows, block_size: int) -> int:
    """Return the blocks over all groups of a request of `num_tokens` tokens with chunked prefill."""
    blocks = -(-num_tokens // block_size)
    return sum(min(blocks, most_blocks(window, block_size)) for window in windows)


def places(layers: Iterable[int | None], windows: Windows) -> list[tuple[int, int]]:
    """Return the group of each layer of a stage, and its index among the stage's layers of the group.

    Args:
        layers: window of each layer.
        windows: window of each group. A layer with any other window goes to the first group, which frees less.
    """
    counts = [0] * len(windows)
    found = []
    for own in layers:
        groups = [group for group, window in enumerate(windows) if window == own] or [0]
        group = min(groups, key=counts.__getitem__)
        found.append((group, counts[group]))
        counts[group] += 1
    return found


def layers_of_a_block(arch: Architecture, layers: range, windows: Windows) -> int:
    """Return how many layers' keys and values a block id has memory for, on the stage with `layers`."""
    return 1 + max((place for _, place in places([arch.kind(i).window for i in layers], windows)), default=-1)


def group_windows(arch: Architecture, split: Sequence[range]) -> Windows:
    """Return the window of each layer group, full attention first, for stages with the layers `split`.

    Minimizes the memory of the longest request; an extra group has to save at least 5%.
    """
    longest = arch.max_position
    kinds = Counter(arch.kind(i).window for layers in split for i in layers)
    hiding = sorted(window for window in kinds if window is not None and window < longest)
    own: list[int | None] = [*hiding] if len(hiding) == len(kinds) else [None, *hiding]
    found: list[tuple[int, Windows]] = []
    choices = product(range(1, _MOST_GROUPS + 1) if len(own) <= _FEW_KINDS else (1,), repeat=len(own))
    for numbers in [(1,), *choices] if len(own) > 1 else [(1,)]:
        if sum(numbers) <= _MOST_GROUPS:
            each = own if len(numbers) == len(own) else [None if None in own else own[-1]]
            windows = tuple(window for window, number in zip(each, numbers, strict=True) for _ in range(number))
            layers = max(layers_of_a_block(arch, stage, windows) for stage in split)
            found.append((layers * blocks_held(longest, windows, 1), windows))
    least = min(tokens for tokens, _ in found)
    return min((windows for tokens, windows in found if tokens <= _WORTH * least), key=len)
