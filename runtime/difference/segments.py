"""The segments of micro-batches, and the share that each has of its micro-batch's cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..core.columns import entries
from ..core.micro_batch_columns import Floats, Ints
from ..core.run_record import MicroBatchRecord


class Segments:
    """The segments of micro-batches, each a chunk or a decode of one request: an entry each, chunks first.

    `RequestSegments` has those of completed micro-batches by request.

    Attributes:
        at: of each segment the place of its micro-batch.
        request: its request.
        tokens: its tokens.
        start: the KV tokens before them.
        is_chunk: whether it is a chunk.
    """

    def __init__(self, micro_batches: Sequence[MicroBatchRecord]) -> None:
        self._sampled = np.array([m.sampled_rows for m in micro_batches], np.float64)
        chunks = [(n, c.request, c.start, c.tokens) for n, m in enumerate(micro_batches) for c in m.chunks]
        of_chunks: Ints = np.array(chunks, np.int64).reshape(-1, 4)
        decodes = np.array([entries(m.decodes.start_column) for m in micro_batches], np.int64)
        requests = np.frombuffer(b"".join([m.decodes.request_column for m in micro_batches]), np.int64)
        starts = np.frombuffer(b"".join([m.decodes.start_column for m in micro_batches]), np.int64)
        self.at: Ints = np.concatenate([of_chunks[:, 0], np.repeat(np.arange(len(micro_batches)), decodes)])
        self.request: Ints = np.concatenate([of_chunks[:, 1], requests])
        self.start: Ints = np.concatenate([of_chunks[:, 2], starts])
        self.tokens: Ints = np.concatenate([of_chunks[:, 3], np.ones(len(requests), np.int64)])
        self.is_chunk = np.arange(len(self.at)) < len(of_chunks)

    def shares(self, weights: Floats) -> Floats:
        """Return the share that each segment has of its micro-batch's cost; they sum to 1 in each micro-batch.

        Linear layers cost by token, attention by pair of a token and one that it sees. What a micro-batch costs as a
        whole is shared by token.

        Args:
            weights: seconds of each feature, 0 or more.
        """
        constant, token, prefix, squared, context, sampled = weights.tolist()
        tokens = np.bincount(self.at, self.tokens, len(self._sampled))
        each = token + (constant + sampled * self._sampled) / np.maximum(tokens, 1.0)
        own = self.tokens.astype(np.float64)
        chunk = own * (prefix * self.start + squared * own)
        cost = own * each[self.at] + np.where(self.is_chunk, chunk, context * (self.start + 1.0))
        whole = np.bincount(self.at, cost, len(self._sampled))
        is_free = whole[self.at] <= 0  # no weight is known: by token
        return np.where(is_free, own / tokens[self.at], cost / np.where(is_free, 1.0, whole[self.at]))
