"""Routes prompts to replicas."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import islice, takewhile

from ...runtime.core.prefix_cache import extend_hashes

_UNEVEN = 1 / 4  # most excess load of a replica with the prefix, as a share of its KV cache


class Router:
    """Least-loaded routing, round-robin among equals, with optional prefix affinity.

    With `by_prefix`, it prefers the replica that was sent the longest prefix of the prompt before, because its prefix
    cache may still contain those blocks. It does so unless that replica's load exceeds the least load by more than a
    quarter of the KV cache's tokens.

    Args:
        block_size: tokens per KV block.
        kv_tokens: capacity of a replica's KV cache in tokens; as many prompt tokens are remembered per replica.
    """

    def __init__(self, num_replicas: int, *, block_size: int, kv_tokens: int, by_prefix: bool) -> None:
        self._num_replicas = num_replicas
        self._block_size = block_size
        self._by_prefix = by_prefix
        self._most_uneven = int(kv_tokens * _UNEVEN)
        self._sent = [_SentBlocks(kv_tokens // block_size) for _ in range(num_replicas)]
        self._next = 0  # the next replica in round-robin order

    def choose(self, prompt: Sequence[int], loads: Mapping[int, int], cache_salt: str = "") -> int:
        """Return the replica for a prompt, and record the choice.

        Args:
            prompt: token ids.
            loads: outstanding tokens of each replica that accepts requests.
            cache_salt: only requests with the same salt share blocks.
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
    """The prompt blocks most recently sent to a replica (LRU)."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._hashes: OrderedDict[bytes, None] = OrderedDict()  # most recently used last

    def known(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks of a prompt the replica was sent."""
        return len(list(takewhile(self._hashes.__contains__, hashes)))

    def add(self, hashes: Sequence[bytes]) -> None:
        # A prefix is useless without its first blocks, so they are evicted last.
        for each in reversed(list(islice(hashes, self._most))):
            self._hashes[each] = None
            self._hashes.move_to_end(each)
        while len(self._hashes) > self._most:
            self._hashes.popitem(last=False)
