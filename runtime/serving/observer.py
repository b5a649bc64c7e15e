"""The interface between the server's engine and observers of its run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..core.request_record import RequestRecord
from ..engine.coordinator import Coordinator
from .messages import FromEngine, Record, Snapshot, Watch


class Observer:
    """Observes a running engine. This one keeps nothing; `launch` plugs in one that keeps the ledger.

    An observer yields messages for the front end, and drops entries of the run's record that it no longer needs.
    """

    def admit(self, request: RequestRecord) -> None:
        """Record a new request."""

    def ask(
        self, message: Watch | Record, coordinator: Coordinator, unfinished: Sequence[RequestRecord]
    ) -> Iterator[FromEngine]:
        """Handle a message from the front end, and yield immediate replies."""
        return iter(())

    def take(self, coordinator: Coordinator) -> Iterator[FromEngine]:
        """Process new entries of the record, and yield messages for the front end. Called periodically."""
        record = coordinator.record
        over = [place for place, micro_batch in enumerate(record.micro_batches, 1) if micro_batch.completed is not None]
        if over:
            del record.micro_batches[: over[-1]]
            record.spans.clear()
        return iter(())

    def completed(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with this observer's counts added."""
        return snapshot
