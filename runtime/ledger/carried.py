"""Which completed micro-batches carried each request, and how much of their work was its own."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..core.features import FEATURES
from ..core.micro_batch_columns import Floats, Ints
from ..core.run_record import RunRecord
from .micro_batch_paths import MicroBatchPaths

Bools = npt.NDArray[np.bool_]

_ROUNDING = 1e-9  # seconds; records round to it
_TOKENS, _PREFIX, _SQUARED, _CONTEXT, _SAMPLED = (
    FEATURES.index(name) for name in ("tokens", "chunk_prefix", "chunk_squared", "decode_context", "sampled_rows")
)


class Carried:
    """Requests in completed micro-batches, an entry each, by request, then by completion.

    Attributes:
        place: [E] of the request in the record; -1 where the record does not have it.
        row: [E] of the micro-batch in the paths.
        begins_prefill: [E] it holds a chunk of the request.
        begins_again: [E] that chunk starts no later than the one before it: the prefill's first, also after a preemption
            or a fault.
        first: [requests] the first entry of each.
    """

    def __init__(self, record: RunRecord, paths: MicroBatchPaths) -> None:
        kept = [record.micro_batches[place] for place in paths.place.tolist()]
        self._completed = paths.completed
        self._num_rows = num_rows = max(1, len(kept))
        numbers = np.array([r.request for r in record.requests], np.int64)
        self._columns = [m.decodes.request_column for m in kept], [m.decodes.start_column for m in kept]
        decoded = np.frombuffer(b"".join(self._columns[0]), np.int64)
        num_decodes = np.array([len(column) // 8 for column in self._columns[0]], np.int64)
        chunks = [(c.request, row, c.start, c.tokens) for row, m in enumerate(kept) for c in m.chunks]
        self._chunks = np.array(chunks, np.int64).reshape(-1, 4)
        self._sampled = np.array([m.sampled_rows for m in kept], np.int64) - num_decodes  # of chunks
        chunk_keys = places_of(numbers, self._chunks[:, 0]) * num_rows + self._chunks[:, 1]
        decode_keys = places_of(numbers, decoded) * num_rows + np.repeat(np.arange(len(kept)), num_decodes)
        keys = np.concatenate([chunk_keys, decode_keys])
        self._order = np.argsort(keys, kind="stable")
        keys = keys[self._order]
        is_new = np.append(True, keys[1:] != keys[:-1])[: len(keys)]  # drafts are several rows of a request
        self._begins = np.flatnonzero(is_new)
        self._key = keys[self._begins]
        self.place: Ints = self._key // num_rows
        self.row: Ints = self._key - self.place * num_rows
        part = self._order[self._begins]  # a chunk comes before decodes of the same request
        self.begins_prefill: Bools = part < len(chunk_keys)
        start = np.full(len(part), -1)
        start[self.begins_prefill] = self._chunks[part[self.begins_prefill], 2]
        before = np.append(-1, start)[:-1]
        follows = np.append(False, self.begins_prefill)[:-1] & (np.append(-2, self.place)[:-1] == self.place)
        self.begins_again: Bools = self.begins_prefill & (~follows | (start <= before))
        self.first: Ints = np.searchsorted(self._key, np.arange(len(numbers)) * num_rows)

    def last_until(self, place: Ints, times: Floats) -> Ints:
        """The last entry of each request that was completed by then; the one before its first where there is none."""
        row = np.searchsorted(self._completed, times + _ROUNDING, side="right") - 1
        found = np.searchsorted(self._key, place * self._num_rows + row, side="right") - 1
        return np.maximum(found, self.first[place] - 1) if len(place) else np.zeros(0, np.int64)

    @cached_property
    def features(self) -> Floats:
        """[E, features] each entry's part of the features of its micro-batch; of the constant it has none."""
        chunks, num_chunks = self._chunks, len(self._chunks)
        starts = np.frombuffer(b"".join(self._columns[1]), np.int64)
        parts = np.zeros((num_chunks + len(starts), len(FEATURES)))
        length = chunks[:, 3]
        parts[:num_chunks, _TOKENS] = length
        parts[:num_chunks, _PREFIX] = chunks[:, 2] * length
        parts[:num_chunks, _SQUARED] = length**2
        in_row = np.maximum(1, np.bincount(chunks[:, 1], minlength=self._num_rows))
        parts[:num_chunks, _SAMPLED] = (np.append(self._sampled, 0)[chunks[:, 1]] / in_row[chunks[:, 1]]).clip(min=0)
        parts[num_chunks:, _TOKENS] = parts[num_chunks:, _SAMPLED] = 1.0
        parts[num_chunks:, _CONTEXT] = starts + 1
        parts = parts[self._order]
        return parts if len(self._begins) == len(parts) else np.add.reduceat(parts, self._begins, axis=0)


def places_of(numbers: Ints, wanted: Ints) -> Ints:
    """The place of each of `wanted` in `numbers`, -1 where it has none."""
    if not len(numbers) or not len(wanted):
        return np.full(len(wanted), -1)
    low = int(numbers.min())
    if int(numbers.max()) - low <= 4 * len(numbers) + 1000:  # nearly always: requests are numbered when they arrive
        place = np.full(int(numbers.max()) - low + 3, -1)
        place[numbers - low + 1] = np.arange(len(numbers))
        return place[np.clip(wanted - low + 1, 0, len(place) - 1)]
    order = np.argsort(numbers, kind="stable")
    at = np.append(order, -1)[np.searchsorted(numbers[order], wanted)]
    return np.where(np.append(numbers, numbers[0] - 1)[at] == wanted, at, -1)
