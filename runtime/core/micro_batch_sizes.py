"""Micro-batch sizes as arrays, to count a stage's FLOPs and bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .micro_batch_columns import Floats, Ints
from .run_record import MicroBatchRecord
from .stage_floor import StageFloor

PHASES = ("prefill", "decode", "mixed")  # of a micro-batch: it has chunks only, decodes only, or both


class Sizes:
    """The micro-batch sizes that FLOPs and bytes depend on.

    Args:
        chunks: per micro-batch, (length, prefix) of each chunk.
        groups: per micro-batch, the number of groups of decodes with equal context.
        contexts: per group, over all micro-batches: KV tokens that each of its decodes attends to.
        decodes: per group, over all micro-batches: the number of its decodes.
        sampled: per micro-batch, rows whose logits are computed.
        reads: per micro-batch, the share of decode rows that read the KV cache; draft tokens add no reads.
    """

    def __init__(
        self,
        chunks: Sequence[Sequence[tuple[int, int]]],
        groups: Sequence[int],
        contexts: Floats,
        decodes: Floats,
        sampled: Sequence[int],
        reads: Sequence[float],
    ) -> None:
        self._num = len(sampled)
        every = np.arange(self._num)
        self._of_chunk = np.repeat(every, [len(each) for each in chunks])
        self._length, self._prefix = np.array([part for each in chunks for part in each], np.float64).reshape(-1, 2).T
        self._of_decode, self._context, self._decodes = np.repeat(every, groups), contexts, decodes
        self._reads = np.array(reads, np.float64)
        self._by_window: dict[int | None, tuple[Floats, Floats, Floats]] = {}
        prefill, alone = self._sum(self._of_chunk, self._length), self._sum(self._of_decode, decodes)
        self.rows = prefill + alone
        self.sampled = np.array(sampled, np.float64)
        self.phase = np.where(alone == 0, 0, np.where(prefill == 0, 1, 2))  # [N], of `PHASES`

    @classmethod
    def of_records(cls, micro_batches: Sequence[MicroBatchRecord]) -> Sizes:
        """Return the sizes of recorded micro-batches."""
        starts = np.frombuffer(b"".join([each.decodes.start_column for each in micro_batches]), np.int64)
        counts = [len(each.decodes) for each in micro_batches]
        return cls(
            [[(chunk.tokens, chunk.start) for chunk in each.chunks] for each in micro_batches],
            counts,
            starts.astype(np.float64) + 1,
            np.ones(len(starts)),
            [each.sampled_rows for each in micro_batches],
            [1 - each.drafts / max(1, count) for each, count in zip(micro_batches, counts, strict=True)],
        )

    def attended(self, window: int | None) -> tuple[Floats, Floats, Floats]:
        """Return (query, key) pairs of chunks, KV tokens before chunks, and (query, key) pairs of decodes, [N] each.

        Args:
            window: most tokens that a query attends to; None: all.
        """
        known = self._by_window.get(window)
        if known is None:
            most = np.inf if window is None else float(window)

            def pairs(tokens: Floats) -> Floats:  # of the first `tokens` queries of a request
                within: Floats = np.minimum(tokens, most)
                found: Floats = within * (within + 1) / 2 + (tokens - within) * (window or 0)
                return found

            known = self._by_window[window] = (
                self._sum(self._of_chunk, pairs(self._prefix + self._length) - pairs(self._prefix)),
                self._sum(self._of_chunk, np.minimum(self._prefix, most)),
                self._sum(self._of_decode, np.minimum(self._context, most) * self._decodes),
            )
        return known

    def flops(self, floor: StageFloor) -> Floats:
        """Return the FLOPs of each micro-batch on a stage, over all its ranks, [N]."""
        pairs = np.zeros(self._num)
        for group in floor.attention:
            of_chunks, _, of_decodes = self.attended(group.window)
            pairs += group.chunk_layers * of_chunks + group.decode_layers * of_decodes
        found: Floats = floor.rows.flops * self.rows + floor.sampled.flops * self.sampled + floor.pair_flops * pairs
        return found

    def bytes(self, floor: StageFloor) -> Floats:
        """Return the bytes that a stage must read for each micro-batch, over all its ranks, [N]."""
        tokens = np.zeros(self._num)
        for group in floor.attention:
            _, of_chunks, of_decodes = self.attended(group.window)
            tokens += group.chunk_layers * of_chunks + group.decode_layers * of_decodes * self._reads
        found: Floats = floor.token_bytes * tokens
        for part, rows in ((floor.rows, self.rows), (floor.sampled, self.sampled)):
            found = found + part.bytes * (rows > 0) + part.expert_bytes * (1 - (1 - floor.expert_share) ** rows)
        return found

    def _sum(self, owner: Ints, values: Floats) -> Floats:
        return np.bincount(owner, values, self._num).astype(np.float64)
