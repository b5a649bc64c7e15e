"""The chunk size C, given or picked as the run goes (paper 4.4)."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from ...core.messages import Span
from ...core.micro_batch import MicroBatch
from ...core.request import Request
from ...core.run_record import MicroBatchRecord
from ..base import Scheduler
from .backlog import Backlog
from .saturation import FIRST, Saturation, aligned

_MARGINAL = 0.875  # of the highest prefill speed is marginally less (paper 4.1);
_ENOUGH = 0.95  # more is worth its delay of decodes while many prompts wait
_EVERY = 64  # micro-batches between looks
_CHANGE = 1.25  # times as much or less is not worth a change
_SPARE = 0.1  # of the running requests could be added, or one: fewer, and slots or blocks are full


class ChunkPicker:
    """`chunk` is what was given, or for `auto` the smallest that saturates a stage (paper 4.1), and where requests
    wait for slots or blocks none larger than every decode needs to ride along.

    With as many requests as can run, b decodes go with each chunk, which is C - b prompt tokens. Up to
    C = b x (P:D + 1) all decodes ride (5.1.4). A larger C spares nothing: as many micro-batches as before have to carry
    the decodes, some of them without a chunk, and those are bubbles (PB2). While slots and blocks are free it is the
    chunk that decides how many decodes there are, and only what saturates a stage counts.
    """

    def __init__(self, chunk: int | Literal["auto"], tile: int, num_stages: int) -> None:
        self.is_auto = chunk == "auto"
        self._tile = tile
        self._saturation = Saturation(tile, num_stages)
        self.chunk = aligned(FIRST, tile) if chunk == "auto" else chunk
        self._backlog = Backlog()
        self._looks = 0
        self._picked: int | None = None
        self._is_full = False  # slots or blocks have been since something began to wait: the right chunk leaves room
        self._prompt_tokens = self._output_tokens = 0  # of finished requests

    def update(self, scheduler: Scheduler) -> str | None:
        """Called before a micro-batch is filled; what was picked and why, in one line, where that changed."""
        if not self.is_auto:
            return None
        self._looks += 1
        saturation, is_look, note = self._saturation, self._looks % _EVERY == 0, None
        if is_look and (saturation.is_known or saturation.is_in_vain or self._picked):
            note = self._pick(scheduler)
        offer = saturation.offer if is_look or not self._picked else None
        self.chunk = offer or self._picked or aligned(FIRST, self._tile)
        return note

    def filled(self, batch: MicroBatch) -> None:
        """Called after a micro-batch was filled."""
        if self.is_auto and batch.chunks:
            self._saturation.dispatched(batch.num_tokens)

    def observe(self, micro_batch: MicroBatchRecord, spans: Sequence[Span]) -> None:
        """Stages, one or several, have computed a micro-batch."""
        if self.is_auto:
            self._saturation.observe(micro_batch, spans)

    def finished(self, request: Request) -> None:
        self._prompt_tokens += request.prompt_len
        self._output_tokens += request.num_output

    @property
    def is_settled(self) -> bool:
        """Whether no sizes are being tried."""
        return self._picked is not None or not self.is_auto

    def _pick(self, scheduler: Scheduler) -> str | None:
        self._backlog.observe(scheduler.backlog, scheduler.depth * self.chunk)
        share = _ENOUGH if self._backlog.is_long else _MARGINAL
        saturated = self._saturation.tokens_at(share)
        chunk = aligned(saturated, self._tile)
        why = f"a stage has {share:.1%} of its prefill speed from {saturated} on"
        if not self._saturation.is_known:
            why += ", as far as prompts are long enough to tell"
        spare = _spare(scheduler)
        running = len(scheduler.running)
        self._is_full = scheduler.num_waiting > 0 and (self._is_full or spare <= max(1.0, _SPARE * running))
        if self._is_full and self._output_tokens:
            riding = (running + spare - len(scheduler.prefilling)) / scheduler.depth
            balanced = riding * (self._prompt_tokens / self._output_tokens + 1)
            if balanced < saturated:
                chunk = max(self._whole(balanced), aligned(math.ceil(riding) + 1, self._tile))
                why = f"with {riding:.3g} decodes, as many as can run, b x (P:D + 1) is {balanced:.0f}; {why}"
        if self._picked and max(chunk, self._picked) <= _CHANGE * min(chunk, self._picked):
            return None
        self._picked = chunk
        return f"chunk=auto: {chunk} tokens (tile {self._tile}): {why}"

    def _whole(self, balanced: float) -> int:
        """Tiles of about so many tokens: fewer, but where a stage is clearly slower by that."""
        fewer = int(balanced / self._tile) * self._tile
        speed = self._saturation.speed_at
        return fewer if speed(fewer) >= _ENOUGH * speed(balanced) else fewer + self._tile


def _spare(scheduler: Scheduler) -> float:
    """Requests that could run besides those that do."""
    running, pool = len(scheduler.running), scheduler.pool
    slots = scheduler.slots - running
    return min(slots, max(0, pool.num_free - running) * running / pool.num_used) if running else slots
