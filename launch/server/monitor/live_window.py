"""A server's last seconds in words: what a recording of the same seconds would say first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ...runtime.core.run_record import RunRecord
from ...runtime.explain.analysed_run import AnalysedRun
from ...runtime.explain.cause_words import causes_listed
from ...runtime.run_folder.run_info import RunInfo
from ...runtime.serving.messages import Snapshot
from ...runtime.serving.recording import RecordedPart, with_part

_LEAST_S = 1.0  # before anything is said


class LiveWindow:
    """The record of a run's newest seconds, made of the parts that come while somebody looks.

    Args:
        seconds: how many.
        now: when somebody began to look, on the clock of all processes of the node, in seconds.
    """

    def __init__(self, seconds: float, now: float) -> None:
        self._seconds = seconds
        self.clear(now)

    def clear(self, now: float) -> None:
        """Begin anew, with what comes from now on."""
        self._since = now
        self._record: RunRecord | None = None

    def take(self, part: RecordedPart) -> None:
        """Add what is new."""
        self._record = with_part(self._record, part)

    def record_at(self, now: float, snapshot: Snapshot) -> RunRecord | None:
        """Return the window that ends now, as a recording would have it; None where it is too short.

        What is older is forgotten.
        """
        begin, known = max(self._since, now - self._seconds), self._record
        if now - begin < _LEAST_S:
            return None
        known = known or RunRecord(len(snapshot.busy), 0)
        known.micro_batches = [each for each in known.micro_batches if each.dispatched >= begin]
        first = known.micro_batches[0].micro_batch if known.micro_batches else float("inf")
        known.spans = [span for span in known.spans if span.micro_batch >= first]
        known.requests = [request for request in known.requests if request.arrival >= begin]
        faults = [fault for fault in snapshot.recovery.newest if fault.up is None or fault.up >= begin]
        waits = known.micro_batches[0].waits if known.micro_batches else []
        idle = [wait.start for wait in waits if wait.reason == "no_request"]
        opened = max(begin, min(idle)) if idle else begin if not known.micro_batches and snapshot.is_idle else None
        closed = now if snapshot.is_idle or snapshot.is_recovering else None
        return RunRecord(
            known.num_stages,
            known.num_blocks,
            list(known.micro_batches),
            list(known.spans),
            list(known.requests),
            faults=faults,
            batch=known.batch,
            depth=known.depth,
            floors=known.floors,
            window=(opened, closed),
        )


class WindowWords(msgspec.Struct):
    """What is said of a window: its `words`, and the heads and rows of the list of its causes, the largest first."""

    words: list[str] = []
    cause_heads: list[str] = []
    cause_rows: list[list[str]] = []

    @classmethod
    def of(cls, run: AnalysedRun) -> WindowWords:
        """Return what is said of a run."""
        heads, rows = causes_listed(run.causes)
        return cls(run.words, [*heads], [[*row] for row in rows])


def said_of(record: RunRecord, config: Mapping[str, Any]) -> WindowWords:
    """Say what cost a window most, and what would change it.

    Args:
        record: of the window.
        config: of the server, in its plain form.
    """
    return WindowWords.of(AnalysedRun.of(record, RunInfo(config)))
