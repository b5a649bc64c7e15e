"""Idle intervals of a stage as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...core.micro_batch_columns import Floats, Ints
from .causes import Cause


@dataclass(frozen=True, slots=True)
class IdleColumns:
    """Idle intervals of one stage, one entry each.

    `cause` indexes `CAUSES`. `place` is the index of the awaited micro-batch in the stage's `Lane`, -1 after the last.
    """

    start: Floats
    end: Floats
    cause: Ints
    place: Ints

    @property
    def seconds(self) -> Floats:
        """The length of each interval."""
        return self.end - self.start

    @classmethod
    def of(cls, start: Floats, end: Floats, cause: Ints | Cause, place: Ints) -> IdleColumns:
        """Build intervals with one `Cause`, or with an array of cause codes.

        Intervals that end before they start are empty.
        """
        return cls(start, end, np.full(len(start), cause.code) if isinstance(cause, Cause) else cause, place)

    @classmethod
    def joined(cls, pieces: Sequence[IdleColumns]) -> IdleColumns:
        """Join all pieces in time order.

        Empty ones are dropped; adjacent ones with the same cause and micro-batch are merged.
        """
        start, end = np.concatenate([p.start for p in pieces]), np.concatenate([p.end for p in pieces])
        cause, place = np.concatenate([p.cause for p in pieces]), np.concatenate([p.place for p in pieces])
        kept = np.flatnonzero(end > start)
        kept = kept[np.argsort(start[kept], kind="stable")]
        start, end, cause, place = start[kept], end[kept], cause[kept], place[kept]
        is_new = np.ones(len(start), bool)
        is_new[1:] = (cause[1:] != cause[:-1]) | (place[1:] != place[:-1]) | (start[1:] != end[:-1])
        first = np.flatnonzero(is_new)
        last = np.append(first[1:], len(start)) - 1 if len(first) else first
        return cls(start[first], end[last], cause[first], place[first])
