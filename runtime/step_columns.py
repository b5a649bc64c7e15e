"""Micro-batches of a run as arrays: a run has many thousands, of up to hundreds of decodes each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .int_column import entries
from .spans import StepRecord

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class StepColumns:
    """`steps` by column, an entry a micro-batch in their order: its number, prompt tokens, decodes, and the KV tokens
    that its decodes attend to, summed."""

    def __init__(self, steps: Sequence[StepRecord]) -> None:
        self.step: Ints = np.array([s.step for s in steps], np.int64)
        self.prefill: Ints = np.array([sum([c.tokens for c in s.chunks]) for s in steps], np.int64)
        self.decodes: Ints = np.array([entries(s.decodes.start_column) for s in steps], np.int64)
        starts = np.frombuffer(b"".join([s.decodes.start_column for s in steps]), np.int64)
        until = np.concatenate([[0], np.cumsum(starts)])[np.concatenate([[0], np.cumsum(self.decodes)])]
        self.context: Ints = np.diff(until) + self.decodes
        self._steps = steps

    @property
    def tokens(self) -> Ints:
        return self.prefill + self.decodes

    def by_request(self, values: Floats) -> dict[int, float]:
        """For each request the sum of `values`, one a micro-batch, over the micro-batches that carried it."""
        chunks = [c.request for s in self._steps for c in s.chunks]
        requests = b"".join([s.decodes.request_column for s in self._steps])
        carried = np.concatenate([np.array(chunks, np.int64), np.frombuffer(requests, np.int64)])
        chunks_each = [len(s.chunks) for s in self._steps]
        weights = np.concatenate([np.repeat(values, chunks_each), np.repeat(values, self.decodes)])
        first, last = int(carried.min(initial=0)), int(carried.max(initial=0))
        if last - first <= len(carried):  # as good as always: they are numbered as they arrive
            names, place = np.arange(first, last + 1), carried - first
        else:
            names, place = np.unique(carried, return_inverse=True)
        return dict(zip(names.tolist(), np.bincount(place, weights, len(names)).tolist(), strict=True))
