"""Summary in words of a server's last seconds, as in a recording of the same window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ....runtime.analysis.explain.analysed_run import AnalysedRun
from ....runtime.analysis.explain.cause_words import causes_listed
from ....runtime.analysis.live.recording import RecordedPart, with_part
from ....runtime.analysis.run_folder.run_info import RunInfo
from ....runtime.core.run_record import RunRecord
from ....runtime.serving.messages import Snapshot

_LEAST_S = 1.0  # shortest window that is explained


class LiveWindow:
    """The record of the last seconds of a run, built from parts that the engine sends while there are viewers.

    Args:
        seconds: length of the window.
        now: time in seconds of the first view, on the clock shared by the node's processes.
    """

    def __init__(self, seconds: float, now: float) -> None:
        self._seconds = seconds
        self.clear(now)

    def clear(self, now: float) -> None:
        """Start over at `now`."""
        self._since = now
        self._record: RunRecord | None = None

    def take(self, part: RecordedPart) -> None:
        """Add a part."""
        self._record = with_part(self._record, part)

    def record_at(self, now: float, snapshot: Snapshot) -> RunRecord | None:
        """Return the window up to `now` as a recording's record; None if it is too short.

        Older data is discarded.
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
    """Explanation of a window: summary in `words`, headers and rows of the table of causes, largest first."""

    words: list[str] = []
    cause_heads: list[str] = []
    cause_rows: list[list[str]] = []

    @classmethod
    def of(cls, run: AnalysedRun) -> WindowWords:
        """Return the summary and causes of an analysed run."""
        heads, rows = causes_listed(run.causes)
        return cls(run.words, [*heads], [[*row] for row in rows])


def said_of(record: RunRecord, config: Mapping[str, Any]) -> WindowWords:
    """Explain the largest costs of a window and the changes that would reduce them.

    Args:
        record: the window's record.
        config: the server's config as a plain mapping.
    """
    return WindowWords.of(AnalysedRun.of(record, RunInfo(config)))
