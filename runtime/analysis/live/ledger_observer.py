"""Observes a server's run: updates its ledger, detects slow stages, and streams data to a viewer or a recording."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from ...core.request_record import RequestRecord
from ...engine.coordinator import Coordinator
from ...serving.messages import TOKEN_BOUNDS, FromEngine, Record, Recorded, Slow, Snapshot, Watch, Watched
from ...serving.observer import Observer
from ..ledger.running_ledger import RunningLedger
from ..ledger.running_stragglers import RunningStragglers
from .live_spans import live_spans
from .recording import Recording


class LedgerObserver(Observer):
    """Keeps the ledger of a run in bounded memory.

    Args:
        depth: maximum micro-batches in flight.
    """

    def __init__(self, depth: int) -> None:
        self._ledger = RunningLedger(depth)
        self._stragglers = RunningStragglers()
        self._watched: Recording | None = None  # while there are viewers
        self._recording: Recording | None = None
        self._tokens = 0
        self._by_tokens = np.zeros(len(TOKEN_BOUNDS) + 1, np.int64)

    def admit(self, request: RequestRecord) -> None:
        """Add an arrived request."""
        for recording in (self._recording, self._watched):
            if recording is not None:
                recording.add(request)

    def ask(
        self, message: Watch | Record, coordinator: Coordinator, unfinished: Sequence[RequestRecord]
    ) -> Iterator[FromEngine]:
        """Start or stop recording or showing the run.

        A recorded window ends with the micro-batches already dispatched.
        """
        now, next_micro_batch = coordinator.clock.now(), coordinator.next_micro_batch
        begun = Recording(coordinator.record, next_micro_batch, unfinished, now) if message.is_on else None
        if isinstance(message, Watch):
            self._watched = begun
        elif begun is not None:
            self._recording = begun
            yield Recorded(begun.first_part(), False)
        elif self._recording is not None:
            self._recording.stop(next_micro_batch, now)

    def take(self, coordinator: Coordinator) -> Iterator[FromEngine]:
        """Count finished micro-batches, yield them for a viewer or a recording, and discard them from the record."""
        record = coordinator.record
        if (counted := self._ledger.count(record)) is not None:
            ledger, first = counted
            self._stragglers.add(ledger, first, self._ledger.idle)
            tokens = ledger.micro_batches.tokens[first:]
            self._tokens += int(tokens.sum())
            self._by_tokens += np.bincount(np.searchsorted(TOKEN_BOUNDS, tokens), minlength=len(self._by_tokens))
            new = record.micro_batches[first : len(ledger.micro_batches.tokens)]
            if self._watched is not None:
                yield live_spans(ledger, first)
                yield from (Watched(part) for part in self._watched.take(new))
            if self._recording is not None:
                yield from (Recorded(part, False) for part in self._recording.take(new))
        if self._recording is not None and self._recording.is_complete(coordinator.has_work):
            yield Recorded(self._recording.last_part(), True)
            self._recording = None
        self._ledger.drop(record)

    def completed(self, snapshot: Snapshot) -> Snapshot:
        """Return a snapshot with the counted totals."""
        ledger, slow = self._ledger, self._stragglers
        return msgspec.structs.replace(
            snapshot,
            tokens=self._tokens,
            by_tokens=self._by_tokens.tolist(),
            busy=ledger.busy.tolist(),
            idle=ledger.idle.tolist(),
            ends=ledger.ends.tolist(),
            slow=[Slow(each.stage, each.start, each.slowdown, each.waited) for each in slow.current],
            slow_seconds=slow.slow_seconds.tolist(),
            compute=ledger.compute.shares(),
        )
