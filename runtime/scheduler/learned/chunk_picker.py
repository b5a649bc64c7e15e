"""The chunk size C: configured, or picked during the run (paper 4.4)."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from ...core.messages import Span
from ...core.micro_batch import MicroBatch
from ...core.queue_snapshot import QueueSnapshot
from ...core.request import Request
from ...core.run_record import MicroBatchRecord
from .saturation import FIRST_SIZE, Saturation, aligned

_SATURATED_SPEED = 0.875  # share of the highest prefill speed that counts as saturated (paper 4.1)
_BACKLOGGED_SPEED = 0.95  # the same while many prompts wait: speed is then worth the delay of decodes
_LONG_BACKLOG = 32  # a backlog of more rounds of chunks through the pipeline is long
_SHORT_BACKLOG = 8  # a backlog of at most this many rounds is short again: prompts can wait a little
_LOOK_INTERVAL = 64  # micro-batches between updates of the chunk size
_WORTHWHILE_CHANGE = 1.25  # ratio of two chunk sizes that is worth a change
_FULL_MARGIN = 0.1  # slots or blocks are full if fewer than this share of the running requests could be added


class ChunkPicker:
    """Provides the chunk size, `chunk`, and picks it for `chunk=auto`.

    It picks the smallest size that saturates a stage (paper 4.1). If requests wait for slots or blocks, the size is
    capped at the largest with which every decode is piggybacked on a chunk. With the maximum number of running
    requests, b decodes accompany each chunk of C - b prompt tokens, and all decodes are piggybacked up to
    C = b x (P:D + 1) (5.1.4). A larger C saves nothing: the decodes need as many micro-batches as before, some of them
    without a chunk, which causes bubbles (PB2). While slots and blocks are free, the chunk size determines how many
    decodes there are, and only saturation counts.
    """

    def __init__(self, chunk: int | Literal["auto"], tile: int, num_stages: int) -> None:
        self.is_auto = chunk == "auto"
        self._tile = tile
        self._saturation = Saturation(tile, num_stages)
        self.chunk = aligned(FIRST_SIZE, tile) if chunk == "auto" else chunk
        self._is_backlogged = False
        self._next_look = _LOOK_INTERVAL
        self._picked: int | None = None
        self._is_full = False  # slots or blocks have been full since requests began to wait
        self._prompt_tokens = self._output_tokens = 0  # of finished requests

    def update(self, number: int, snapshot: Callable[[], QueueSnapshot]) -> str | None:
        """Set `chunk` for micro-batch `number`.

        Returns:
            One line with the new size and the reason, or None if it did not change.
        """
        if not self.is_auto:
            return None
        saturation, note = self._saturation, None
        can_tell = saturation.is_known or saturation.is_in_vain
        is_due = number >= self._next_look
        if is_due:
            self._next_look = number + _LOOK_INTERVAL
        is_look = is_due or (can_tell and not self._picked)
        if is_look and (can_tell or self._picked):
            note = self._pick(snapshot())
        offer = saturation.offer if is_look or not self._picked else None
        self.chunk = offer or self._picked or aligned(FIRST_SIZE, self._tile)
        return note

    def filled(self, batch: MicroBatch) -> None:
        """Record a micro-batch that has just been filled."""
        if self.is_auto and batch.chunks:
            self._saturation.dispatched(batch.num_tokens)

    def observe(self, micro_batch: MicroBatchRecord, spans: Sequence[Span]) -> None:
        """Learn from the spans of one or several stages that have computed a micro-batch."""
        if self.is_auto:
            self._saturation.observe(micro_batch, spans)

    def finished(self, request: Request) -> None:
        """Record the lengths of a finished request."""
        self._prompt_tokens += request.prompt_len
        self._output_tokens += request.num_output

    @property
    def is_settled(self) -> bool:
        """Whether the trials of sizes are over."""
        return self._picked is not None or not self.is_auto

    @property
    def overhead(self) -> float | None:
        """Fixed cost of a chunk in a stage, in seconds; None unless `auto` and all sizes have been tried."""
        return self._saturation.overhead if self.is_auto and self._saturation.is_known else None

    def _pick(self, queues: QueueSnapshot) -> str | None:
        rounds = _SHORT_BACKLOG if self._is_backlogged else _LONG_BACKLOG
        self._is_backlogged = queues.backlog > rounds * queues.depth * self.chunk
        share = _BACKLOGGED_SPEED if self._is_backlogged else _SATURATED_SPEED
        saturated = self._saturation.tokens_at(share)
        chunk = aligned(saturated, self._tile)
        why = f"a stage has {share:.1%} of its prefill speed from {saturated} on"
        if not self._saturation.is_known:
            why += ", as far as prompts are long enough to tell"
        has_no_room = queues.num_admissible <= max(1.0, _FULL_MARGIN * queues.num_running)
        self._is_full = queues.num_waiting > 0 and (self._is_full or has_no_room)
        if self._is_full and self._output_tokens:
            riding = queues.decodes_a_micro_batch
            balanced = riding * (self._prompt_tokens / self._output_tokens + 1)
            if balanced < saturated:
                chunk = max(self._whole_tiles(balanced), aligned(math.ceil(riding) + 1, self._tile))
                why = f"with {riding:.3g} decodes, as many as can run, b x (P:D + 1) is {balanced:.0f}; {why}"
        if self._picked and max(chunk, self._picked) <= _WORTHWHILE_CHANGE * min(chunk, self._picked):
            return None
        self._picked = chunk
        return f"chunk=auto: {chunk} tokens (tile {self._tile}): {why}"

    def _whole_tiles(self, num_tokens: float) -> int:
        """Return `num_tokens` rounded down to whole tiles, or one tile more if that makes a stage clearly slower."""
        fewer = int(num_tokens / self._tile) * self._tile
        speed = self._saturation.speed_at
        return fewer if speed(fewer) >= _BACKLOGGED_SPEED * speed(num_tokens) else fewer + self._tile
