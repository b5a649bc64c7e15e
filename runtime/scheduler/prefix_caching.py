"""Prefix caching at admission: requests that begin with the same tokens share KV blocks."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from collections.abc import Sequence

from ..core.block_pool import NOTHING_CACHED, BlockPool, CachedPrefix
from ..core.micro_batch import Chunk
from ..core.request import Request


class PrefixCaching:
    """Finds the cached prefixes of waiting requests, and caches the blocks that running requests fill.

    It does nothing if the pool has no prefix cache.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._cache = pool.cache

    def hash(self, request: Request) -> None:
        """Hash the blocks of a new or preempted request."""
        if self._cache is not None:
            request.hash_blocks(request.prefill_target, self._pool.block_size)

    def find(self, request: Request) -> CachedPrefix:
        """Return the cached prefix of a waiting request; none if it needs prompt log-probabilities."""
        if self._cache is None or not request.block_hashes or request.prompt_logprobs is not None:
            return NOTHING_CACHED
        # The last prompt token is always computed: the next token is sampled from its logits.
        return self._pool.find(request.block_hashes, (request.prefill_target - 1) // self._pool.block_size)

    def begin(self, request: Request, prefix: CachedPrefix) -> int:
        """Give an admitted request its cached prefix. Return the number of tokens, which count as computed."""
        hit = prefix.num_blocks * self._pool.block_size
        if hit:
            request.num_dispatched = request.num_completed = hit
            self._pool.take_over(request, prefix)
            request.num_blocks_hashed = prefix.num_blocks
        if self._cache is not None and not request.preemptions and request.record.first_dispatched is None:
            request.record.cached_tokens = hit
            self._cache.queries += request.prompt_len
            self._cache.hits += hit
        return hit

    def dispatched(self, chunks: Sequence[Chunk]) -> None:
        """Cache the blocks that these chunks fill."""
        if self._cache is not None:
            for chunk in chunks:
                self._store(chunk.request, chunk.request.num_dispatched)

    def leave(self, request: Request) -> None:
        """Cache the full blocks of a request that is about to release them, unless it ended with an error."""
        if self._cache is not None:
            if request.finish_reason != "error":
                request.hash_blocks(request.num_completed, self._pool.block_size)
                self._store(request, request.num_completed)
            request.num_blocks_hashed = 0

    def forget(self, request: Request) -> None:
        """Hide the content of a request's blocks from later requests."""
        if self._cache is not None:
            self._pool.forget(request)

    def _store(self, request: Request, num_tokens: int) -> None:
        """Cache the full blocks of a request's first `num_tokens` tokens, which are dispatched."""
        stop = min(num_tokens // self._pool.block_size, len(request.block_hashes))
        if stop > request.num_blocks_hashed:
            self._pool.store(request, stop)
            request.num_blocks_hashed = stop
