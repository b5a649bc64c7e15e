"""The segments of each request in completed micro-batches, and their cost in compute time."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from ...core.features import FEATURES
from ...core.micro_batch_columns import Floats, Ints
from ...core.run_record import RunRecord
from .micro_batch_paths import MicroBatchPaths

Bools = npt.NDArray[np.bool_]

_ROUNDING = 1e-9  # seconds; records round to it
_CONSTANT, _TOKENS, _PREFIX, _SQUARED, _CONTEXT, _SAMPLED = range(len(FEATURES))  # columns, as in `Features`


class RequestSegments:
    """The segments of requests in completed micro-batches, by request, then by completion.

    An entry is a request's whole share of one micro-batch: a prefill chunk, or a decode with its draft tokens.

    Attributes:
        place: [E] index of the request in the record; -1 if the record does not contain it.
        row: [E] row of the micro-batch in the paths.
        begins_prefill: [E] whether the entry contains a chunk of the request.
        begins_again: [E] whether that chunk is the first of a prefill, including one after a preemption or a fault.
        first: [requests] the first entry of each.
    """

    def __init__(self, record: RunRecord, paths: MicroBatchPaths) -> None:
        kept = [record.micro_batches[place] for place in paths.place.tolist()]
        self._completed = paths.completed
        self._num_rows = num_rows = max(1, len(kept))
        numbers = np.array([r.request for r in record.requests], np.int64)
        columns = [m.decodes.request_column for m in kept]
        self._start_columns = [m.decodes.start_column for m in kept]
        decoded = np.frombuffer(b"".join(columns), np.int64)
        num_decodes = np.array([len(column) // 8 for column in columns], np.int64)
        chunks = [(c.request, row, c.start, c.tokens) for row, m in enumerate(kept) for c in m.chunks]
        self._chunks = np.array(chunks, np.int64).reshape(-1, 4)
        self._chunks_sampled = np.array([m.sampled_rows for m in kept], np.int64) - num_decodes
        places = np.concatenate([places_of(numbers, self._chunks[:, 0]), places_of(numbers, decoded)])
        rows = np.concatenate([self._chunks[:, 1], np.repeat(np.arange(len(kept)), num_decodes)])
        keys = places * num_rows + rows
        # If each prompt precedes its decodes, a stable sort by request suffices; numpy sorts small integers fastest.
        small = (places + 1).astype(np.uint16) if len(numbers) < 65_535 else places
        self._order = np.argsort(small, kind="stable")
        if (keys[self._order[1:]] < keys[self._order[:-1]]).any():  # after a preemption or a fault
            self._order = np.argsort(keys, kind="stable")
        keys = keys[self._order]
        is_new = np.append(True, keys[1:] != keys[:-1])[: len(keys)]  # draft tokens add rows to a request
        self._begins = np.flatnonzero(is_new)
        self._key = keys[self._begins]
        self.place: Ints = self._key // num_rows
        self.row: Ints = self._key - self.place * num_rows
        part = self._order[self._begins]  # a chunk comes before decodes of the same request
        self.begins_prefill: Bools = part < len(self._chunks)
        start = np.full(len(part), -1)
        start[self.begins_prefill] = self._chunks[part[self.begins_prefill], 2]
        before = np.append(-1, start)[:-1]
        follows = np.append(False, self.begins_prefill)[:-1] & (np.append(-2, self.place)[:-1] == self.place)
        self.begins_again: Bools = self.begins_prefill & (~follows | (start <= before))
        self.first: Ints = np.searchsorted(self._key, np.arange(len(numbers)) * num_rows)

    def entries_of_tokens(self, place: Ints, token: Ints, times: Floats) -> Ints:
        """Return, for each token, the last entry of its request that was completed by the token's time.

        If there is none, it is the entry before the request's first.

        Args:
            place: [n] index of the request in the record; tokens of a request are consecutive.
            token: [n] index of the token in the request.
            times: [n].
        """
        found = self._last_until(place[token == 0], times[token == 0])
        found = np.repeat(found, np.diff(np.append(np.flatnonzero(token == 0), len(token)))) + token
        # Nearly always the request's next entry produces its next token.
        completed = np.append(self._completed, np.inf)[np.append(self.row, -1)[np.clip(found, -1, len(self.row))]]
        beyond = found >= np.append(self.first, len(self.row))[place + 1]  # entries of its request
        other = np.flatnonzero(beyond | (np.abs(completed - times) > _ROUNDING))
        found[other] = self._last_until(place[other], times[other])
        return found

    def _last_until(self, place: Ints, times: Floats) -> Ints:
        row = np.searchsorted(self._completed, times + _ROUNDING, side="right") - 1
        found = np.searchsorted(self._key, place * self._num_rows + row, side="right") - 1
        return np.maximum(found, self.first[place] - 1) if len(place) else np.zeros(0, np.int64)

    @cached_property
    def _decodes(self) -> tuple[Floats, Floats]:
        """The decode rows of each entry, [E], and the KV tokens that they attend to, [E]."""
        num_chunks = len(self._chunks)
        starts = np.frombuffer(b"".join(self._start_columns), np.int64)
        context = np.concatenate([np.full(num_chunks, -1), starts])[self._order] + 1.0
        rows = np.ones(len(context))
        rows[self._order < num_chunks] = 0.0
        if len(rows) > len(self._begins):
            rows, context = np.add.reduceat(rows, self._begins), np.add.reduceat(context, self._begins)
        return rows, context

    @cached_property
    def _prefills(self) -> tuple[Ints, Floats]:
        """The entries with a chunk, [C], and the chunks' features, [C, features]."""
        entries = np.flatnonzero(self.begins_prefill)
        chunks = self._chunks[self._order[self._begins[entries]]]
        in_row = np.bincount(chunks[:, 1], minlength=self._num_rows)
        features = np.zeros((len(chunks), len(FEATURES)))
        features[:, _TOKENS] = chunks[:, 3]
        features[:, _PREFIX] = chunks[:, 2] * chunks[:, 3]
        features[:, _SQUARED] = chunks[:, 3] ** 2
        features[:, _SAMPLED] = (self._chunks_sampled[chunks[:, 1]] / in_row[chunks[:, 1]]).clip(min=0)
        return entries, features

    def features_by_row(self) -> Floats:
        """Return the features of each micro-batch, [R, features]; the constant is 1."""
        rows, context = self._decodes
        entries, features = self._prefills
        total = np.empty((len(self._completed), len(FEATURES)))
        for column in range(len(FEATURES)):
            total[:, column] = np.bincount(self.row[entries], features[:, column], len(total))
        decodes = np.bincount(self.row, rows, len(total))
        total[:, _TOKENS] += decodes
        total[:, _SAMPLED] += decodes
        total[:, _CONTEXT] += np.bincount(self.row, context, len(total))
        total[:, _CONSTANT] = 1.0
        return total

    def cost(self, price: Floats, used: Ints, entries: Ints | None = None) -> Floats:
        """Return the cost of some entries' tokens in seconds, each at a row of `price`.

        Args:
            price: [rows, features] seconds per unit of each feature; the constant is ignored.
            used: [entries] row of `price` for each.
            entries: their indices; None: all.
        """
        rows, context = self._decodes
        with_chunk, features = self._prefills
        if entries is None:
            at, prefills = with_chunk, features
        else:
            rows, context = rows[entries], context[entries]
            at = np.flatnonzero(self.begins_prefill[entries])
            prefills = features[np.searchsorted(with_chunk, entries[at])]
        total: Floats = rows * (price[:, _TOKENS] + price[:, _SAMPLED])[used] + context * price[:, _CONTEXT][used]
        total[at] += np.einsum("cf,cf->c", prefills[:, _TOKENS:], price[used[at], _TOKENS:])
        return total


def places_of(numbers: Ints, wanted: Ints) -> Ints:
    """Return the index in `numbers` of each of `wanted`, -1 if it is absent."""
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
