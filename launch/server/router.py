"""Which replica a prompt goes to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import islice, takewhile

from ...runtime.core.prefix_cache import extend_hashes

_UNEVEN = 1 / 4  # of a replica's KV cache: how much more load than the least a replica may have that knows a prompt


class Router:
    """Chooses the replica with the least load; by turns among equals.

    With `by_prefix`, it prefers the replica that was sent the longest part of the prompt before, since the blocks of
    that part may still be in its prefix cache. It does so unless that replica's load exceeds the least by more than a
    quarter of the tokens that a KV cache holds.

    Args:
        block_size: tokens of a KV block.
        kv_tokens: tokens that a replica's KV cache holds of long requests; as many of prompts are remembered for each.
    """

    def __init__(self, num_replicas: int, *, block_size: int, kv_tokens: int, by_prefix: bool) -> None:
        self._num_replicas = num_replicas
        self._block_size = block_size
        self._by_prefix = by_prefix
        self._most_uneven = int(kv_tokens * _UNEVEN)
        self._sent = [_SentBlocks(kv_tokens // block_size) for _ in range(num_replicas)]
        self._next = 0  # the replica whose turn it is among equals

    def choose(self, prompt: Sequence[int], loads: Mapping[int, int], cache_salt: str = "") -> int:
        """Return the replica for a prompt, and count on its going there.

        Args:
            prompt: token ids.
            loads: by replica that takes requests, the tokens that it has still to compute.
            cache_salt: only requests of the same one share blocks.
        """
        assert loads
        hashes: list[bytes] = []
        if self._by_prefix:
            extend_hashes(hashes, prompt, self._block_size, cache_salt)
        least = min(loads.values())
        known = {replica: self._sent[replica].known(hashes) for replica in loads}
        near = [replica for replica, load in loads.items() if load - least <= self._most_uneven]
        longest = max(known[replica] for replica in near)
        if longest:
            equals = [replica for replica in near if known[replica] == longest]
            least = min(loads[replica] for replica in equals)
            equals = [replica for replica in equals if loads[replica] == least]
        else:
            equals = [replica for replica, load in loads.items() if load == least]
        chosen = min(equals, key=lambda replica: (replica - self._next) % self._num_replicas)
        self._next = chosen + 1
        self._sent[chosen].add(hashes)
        return chosen


class _SentBlocks:
    """The blocks of prompts that a replica was sent last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._hashes: OrderedDict[bytes, None] = OrderedDict()  # those used last at the end

    def known(self, hashes: Sequence[bytes]) -> int:
        """Return how many blocks at the beginning of a prompt it was sent."""
        return len(list(takewhile(self._hashes.__contains__, hashes)))

    def add(self, hashes: Sequence[bytes]) -> None:
        # A prefix is of no use without its beginning, which is therefore forgotten last.
        for each in reversed(list(islice(hashes, self._most))):
            self._hashes[each] = None
            self._hashes.move_to_end(each)
        while len(self._hashes) > self._most:
            self._hashes.popitem(last=False)
