"""Base class of chunked-prefill policies: the chunk size C is configured, or picked during the run."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mypy_extensions import mypyc_attr

from ...conf.policies import EqualTimeConfig, SarathiConfig
from ..core.block_pool import BlockPool
from ..core.messages import Span
from ..core.micro_batch import MicroBatch
from ..core.queue_snapshot import QueueSnapshot
from ..core.request import Request
from ..core.run_record import MicroBatchRecord
from .base import Scheduler
from .learned.chunk_picker import ChunkPicker
from .limits import Limits


@mypyc_attr(allow_interpreted_subclasses=True)
class ChunkedScheduler(Scheduler):
    """A policy with a chunk size, `chunk`; with `chunk=auto` it is learned from the run's spans (`ChunkPicker`)."""

    def __init__(self, config: SarathiConfig | EqualTimeConfig, limits: Limits, pool: BlockPool) -> None:
        super().__init__(config, replace(limits, tile=config.tile or limits.tile), pool)
        self.picker = ChunkPicker(config.chunk, self.limits.tile, limits.num_stages)
        self.chunk = self.picker.chunk

    def prepare(self) -> None:
        """Pick the chunk size."""
        if note := self.picker.update(self._turn, self.queue_snapshot):
            self.notes.append(note)
        self.chunk = self.picker.chunk

    def filled(self, batch: MicroBatch) -> None:
        """Report the filled micro-batch to the picker."""
        self.picker.filled(batch)

    def draft_room(self, batch: MicroBatch) -> int:
        """Return the draft tokens that fit up to the tile, and with a prompt chunk up to `chunk` tokens in total."""
        room = super().draft_room(batch)
        return min(room, self.chunk - batch.num_tokens) if batch.chunks else room

    def observe(self, micro_batch: MicroBatchRecord, spans: Sequence[Span]) -> None:
        """Learn which chunk size to pick."""
        self.picker.observe(micro_batch, spans)

    def finish(self, request: Request, reason: str) -> None:
        """Finish a request; the picker records its lengths."""
        self.picker.finished(request)
        super().finish(request, reason)

    def queue_snapshot(self) -> QueueSnapshot:
        """Return the current queue statistics."""
        running, pool = len(self.running), self.pool
        free_slots = self.slots - running
        admissible = 1.0 * free_slots
        if running:  # as many as fit into the free blocks, at the mean size of the running requests
            admissible = min(free_slots, max(0, pool.num_free - running) * running / pool.num_used)
        return QueueSnapshot(
            depth=self.depth,
            backlog=self.backlog,
            num_waiting=self.num_waiting,
            num_running=running,
            num_prefilling=len(self.prefilling),
            num_admissible=admissible,
        )
