"""Groups of layers that share a block table, so that blocks wholly behind a layer's window can be freed.

A block id stands for the keys and values of `block_size` tokens in the layers of one group. On each stage an id has the
memory of as many layers as the stage's largest group, whichever group it is given to: one pool serves all groups, and
the same ids hold on every stage. vLLM's hybrid KV cache manager groups layers in this way.

This file imports no torch.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product

from ..conf.architecture import Architecture

Windows = tuple[int | None, ...]  # of each group; None: full attention
ONE_TABLE: Windows = (None,)  # for all layers: no block is freed before its request ends

_MOST_GROUPS = 8  # each has a table of its own, in the coordinator and on each rank
_FEW_KINDS = 3  # of windows, for which all numbers of groups are tried
_WORTH = 1.05  # a group more must save 5% of the memory


def most_blocks(window: int | None, block_size: int) -> int:
    """Return the most blocks that a request is promised in a group: those of its window and as many tokens ahead."""
    return sys.maxsize if window is None else -(-(2 * window - 1) // block_size) + 1


def blocks_held(num_tokens: int, windows: Windows, block_size: int) -> int:
    """Return the blocks, over all groups, of a request that has come to `num_tokens` tokens by chunks."""
    blocks = -(-num_tokens // block_size)
    return sum(min(blocks, most_blocks(window, block_size)) for window in windows)


def places(layers: Iterable[int | None], windows: Windows) -> list[tuple[int, int]]:
    """Return the group of each layer of a stage, and its place among the stage's layers of the group.

    Args:
        layers: window of each layer.
        windows: of the groups. A layer whose own is not among them is of the first group, which frees less.
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
    """Return the layers whose keys and values a block id has memory for on the stage that holds `layers`."""
    return 1 + max((place for _, place in places([arch.kind(i).window for i in layers], windows)), default=-1)


def group_windows(arch: Architecture, split: Sequence[range]) -> Windows:
    """Return the window of each group of layers, full attention first, for stages that hold `split`.

    They are those with which the longest request takes the least memory.
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
