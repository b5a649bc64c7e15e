"""The block tables of all requests of a rank, in one array."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_ROWS = _COLUMNS = 64  # initially; both double as needed


class BlockTables:
    """The KV blocks of each request in order, one array row per request, so that many are read at once."""

    def __init__(self) -> None:
        self._blocks = np.zeros((_ROWS, _COLUMNS), dtype=np.int32)
        self._free = list(range(_ROWS - 1, -1, -1))
        self._row: dict[int, int] = {}
        self._length: dict[int, int] = {}

    def add(self, request: int) -> None:
        """Add a new request without blocks."""
        assert request not in self._row, request
        if not self._free:
            rows = len(self._blocks)
            self._blocks = np.concatenate([self._blocks, np.zeros_like(self._blocks)])
            self._free = list(range(2 * rows - 1, rows - 1, -1))
        self._row[request], self._length[request] = self._free.pop(), 0

    def drop(self, request: int) -> None:
        """Remove an existing request."""
        self._free.append(self._row.pop(request))
        del self._length[request]

    def append(self, request: int, blocks: Sequence[int] | np.ndarray) -> None:
        """Append blocks to a request's table."""
        first = self._length[request]
        last = self._length[request] = first + len(blocks)
        while last > self._blocks.shape[1]:
            self._blocks = np.concatenate([self._blocks, np.zeros_like(self._blocks)], axis=1)
        self._blocks[self._row[request], first:last] = blocks

    def of(self, request: int) -> np.ndarray:
        """Return a copy of the blocks of a request, [length] int32."""
        return self._blocks[self._row[request], : self._length[request]].copy()

    def of_each(self, requests: Sequence[int], most: int) -> np.ndarray:
        """Return a copy of the first `most` blocks of each request, [requests, most] int32.

        Entries after a request's last block are undefined.
        """
        assert most <= self._blocks.shape[1]
        return self._blocks[[self._row[request] for request in requests], :most]
