"""The micro-batches of a run as arrays: a run has many thousands, with up to hundreds of decodes each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from .columns import entries
from .features import FEATURES, features
from .run_record import MicroBatchRecord

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
N = TypeVar("N", np.int64, np.float64)


def values_at(column: npt.NDArray[N], places: Ints) -> npt.NDArray[N]:
    """Return the column's values at `places`, with 0 for a place of -1."""
    values, known = np.zeros(len(places), column.dtype), places >= 0
    values[known] = column[places[known]]
    return values


class MicroBatchColumns:
    """The micro-batches of a record by column, one entry per micro-batch, in order.

    The columns are the number (`micro_batch`), prompt tokens (`prefill`), decode rows (`decodes`), and the KV tokens
    that those rows attend to, summed (`context`).
    """

    def __init__(self, micro_batches: Sequence[MicroBatchRecord]) -> None:
        self.micro_batch: Ints = np.array([s.micro_batch for s in micro_batches], np.int64)
        self.prefill: Ints = np.array([sum([c.tokens for c in s.chunks]) for s in micro_batches], np.int64)
        self.decodes: Ints = np.array([entries(s.decodes.start_column) for s in micro_batches], np.int64)
        starts = np.frombuffer(b"".join([s.decodes.start_column for s in micro_batches]), np.int64)
        until = np.concatenate([[0], np.cumsum(starts)])[np.concatenate([[0], np.cumsum(self.decodes)])]
        self.context: Ints = np.diff(until) + self.decodes
        self._micro_batches = micro_batches

    @property
    def tokens(self) -> Ints:
        """Tokens of each micro-batch, of chunks and decodes, [N]."""
        return self.prefill + self.decodes

    @cached_property
    def dispatched(self) -> Floats:
        """Times of dispatch, in seconds on the coordinator's clock."""
        return np.array([s.dispatched for s in self._micro_batches], np.float64)

    @cached_property
    def chunks(self) -> Ints:
        """The number of chunks per micro-batch."""
        return np.array([len(s.chunks) for s in self._micro_batches], np.int64)

    @cached_property
    def chunk_prefix(self) -> Ints:
        """KV tokens before each chunk, summed per micro-batch."""
        return np.array([sum([c.start for c in s.chunks]) for s in self._micro_batches], np.int64)

    @cached_property
    def features(self) -> Floats:
        """The features of each micro-batch, [N, features]."""
        rows = [features(s) for s in self._micro_batches]
        return np.array(rows, np.float64).reshape(-1, len(FEATURES))

    @cached_property
    def counters(self) -> Ints:
        """[micro-batches, 3]: KV blocks used, requests running and waiting, at dispatch."""
        rows = [(s.kv_blocks_used, s.num_running, s.num_waiting) for s in self._micro_batches]
        return np.array(rows, np.int64).reshape(-1, 3)

    @cached_property
    def by_number(self) -> Ints:
        """Places of the micro-batches, sorted by their numbers."""
        return np.argsort(self.micro_batch, kind="stable")

    def places(self, numbers: Ints) -> Ints:
        """Return the places of the micro-batches with these numbers, -1 for unknown numbers."""
        place = np.append(self.by_number, -1)[np.searchsorted(self.micro_batch, numbers, sorter=self.by_number)]
        return np.where(np.append(self.micro_batch, -1)[place] == numbers, place, -1)

    def by_request(self, values: Floats) -> dict[int, float]:
        """Sum `values`, one per micro-batch, over the micro-batches of each request."""
        chunks = [c.request for s in self._micro_batches for c in s.chunks]
        requests = b"".join([s.decodes.request_column for s in self._micro_batches])
        decoded, decodes_of = np.frombuffer(requests, np.int64), np.repeat(np.arange(len(values)), self.decodes)
        if any(s.drafts for s in self._micro_batches):  # several rows of a request count once
            is_first = np.ones(len(decoded), bool)
            is_first[1:] = (decoded[1:] != decoded[:-1]) | (decodes_of[1:] != decodes_of[:-1])
            decoded, decodes_of = decoded[is_first], decodes_of[is_first]
        carried = np.concatenate([np.array(chunks, np.int64), decoded])
        chunks_each = [len(s.chunks) for s in self._micro_batches]
        weights = np.concatenate([np.repeat(values, chunks_each), values[decodes_of]])
        first, last = int(carried.min(initial=0)), int(carried.max(initial=0))
        if last - first <= len(carried):  # nearly always, as requests are numbered when they arrive
            names, place = np.arange(first, last + 1), carried - first
        else:
            names, place = np.unique(carried, return_inverse=True)
        return dict(zip(names.tolist(), np.bincount(place, weights, len(names)).tolist(), strict=True))
