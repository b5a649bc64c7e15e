"""Micro-batches of equal predicted time: ours. SARATHI makes them equal in tokens, which is not the same."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

import math
from collections.abc import Sequence

from mypy_extensions import mypyc_attr

from ....conf.policies import EqualTimeConfig
from ...core.block_pool import BlockPool
from ...core.messages import Span
from ...core.micro_batch import MicroBatch
from ...core.request import Request
from ...core.run_record import MicroBatchRecord
from ..base import Limits, Scheduler
from ..learned.backlog import SHORT_ROUNDS, Backlog
from ..learned.chunk_growth import ChunkGrowth
from ..learned.chunk_picker import ChunkPicker
from ..learned.decode_dealer import DecodeDealer
from ..learned.long_prompt import next_chunk
from ..learned.rival_fits import RivalFits
from ..learned.stage_times import read_profile
from ..learned.target_time import SMALLEST_CHUNK, TargetTime
from ..learned.turnaround import Turnaround

_TILE_ALIGNMENT_LOSS = 0.05  # of a chunk is given up for a multiple of the tile; more would make the times unequal
_COARSE_TILES = 4  # most tiles of a chunk that holds whole ones


@mypyc_attr(allow_interpreted_subclasses=True)
class EqualTime(Scheduler):
    """Each micro-batch is filled to the same predicted time of the slowest stage.

    Decodes come first, dealt over the depth by predicted time. While there are decodes only, they are dealt over fewer
    micro-batches where these come round sooner. Chunks fill what is left of the time, so
    that a chunk shrinks as its prefix and the decodes' contexts grow. Where a prompt ends early, the first chunk of the
    next one fills up. Where no other prompt waits, the rest of a prompt is cut into equal chunks, not into whole ones
    and a tiny tail. Chunks of one prompt follow each other through the pipeline.

    A prompt of many rounds has one time for all of its chunks: that of a chunk in its middle. Alone, with `chunk=auto`,
    it is the time with which its first token comes the soonest.

    Where a chunk is a few tiles long, times grow in steps of a tile, and a micro-batch holds whole tiles (paper 4.4):
    the number nearest to what fills it, at most a chunk's.

    While more prompt tokens wait than `iterations` micro-batches take, the chunk grows, up to `max_prefill_tokens`.
    That carries more requests/s and shortens TTFT, at the price of TBT. A `target_ms` is kept to.

    The time to fill to is `target_ms`, else the time of a typical micro-batch of `chunk` tokens. Stage times are
    learned from the spans of the run; until the first fit, tokens stand for time. The depth is the number of stages,
    and one more while even the busiest stage idles although prompts wait and fill micro-batches.
    """

    def __init__(self, config: EqualTimeConfig, limits: Limits, pool: BlockPool) -> None:
        super().__init__(config, limits, pool)
        self.tile = config.tile or limits.tile
        self.picker = ChunkPicker(config.chunk, self.tile, limits.stages)
        self.chunk = self.picker.chunk  # grown while prompts pile up
        self._growth: ChunkGrowth | None = None
        if config.iterations is not None and config.target_ms is None:
            self._growth = ChunkGrowth(config.iterations, config.max_prefill_tokens, self.tile)
        profile = read_profile(config.profile, limits.stages)
        self.fits = RivalFits(limits.stages, self.tile, self._least_depth, profile)
        target_s = None if config.target_ms is None else config.target_ms / 1e3
        self.target = TargetTime(target_s, self.picker.chunk, self.fits)
        self._turnaround = Turnaround(limits.stages)
        self._prompts = Backlog()
        self._dealer = DecodeDealer(self._least_depth)
        self._left_s = 0.0  # of the time of the last micro-batch, after its chunks

    def fill(self, batch: MicroBatch) -> None:
        self._learn()
        prompt = self.next_prompt()
        most = self.limits.batch - 1 if prompt else self.limits.batch
        num_decodes = len(self.running) - len(self.prefilling)
        target_seconds = self._target_seconds(prompt)
        seconds = target_seconds if prompt else None
        self.take_decodes(batch, self._dealer.share(self.ready, self.depth, num_decodes, most, seconds))
        context = sum([request.num_dispatched for request in batch.decodes])
        cost = self.target.cost
        left = target_seconds - cost.of_decodes(len(batch.decodes), context)
        while batch.num_requests < self.limits.batch and (prompt := self.next_prompt()):
            length = self._chunk_length(batch, prompt, left)
            if not length:
                break
            left -= cost.of_chunk(length, prompt.num_dispatched)
            self.take_chunk(batch, prompt, length)
            if prompt.remaining_prefill:
                break
        self._left_s = left
        if not batch:
            self.take_decodes(batch, 1)  # no decode of this micro-batch's share is ready
        if batch:
            self.target.typical.observe(batch, context, self.target.whole_chunk(self.chunk), self._turn)
        self.picker.filled(batch)

    def _target_seconds(self, prompt: Request | None) -> float:
        """Return the time that a micro-batch is filled to whose first chunk is of `prompt`."""
        if prompt is None or not self._is_long(prompt):
            return self.target.seconds(self.chunk, self._free_slots)
        tokens, overhead = prompt.prefill_target, self.picker.overhead
        if overhead and len(self.running) == 1 and not self.num_waiting:
            return self.target.alone(tokens, overhead, self.limits.stages)
        return self.target.of_long_prompt(tokens, self.chunk)

    def _is_long(self, prompt: Request) -> bool:
        """Whether a prompt runs for so many rounds that its own time is worth a change of the target."""
        return self.fits.is_fitted and prompt.prefill_target > SHORT_ROUNDS * self._tokens_a_round

    def _long_chunk_length(self, batch: MicroBatch, prompt: Request, seconds: float) -> int:
        """Return the tokens of the next chunk of a long prompt, which adds about `seconds`; 0 for none."""
        cost, remaining, prefix = self.target.cost, prompt.remaining_prefill, prompt.num_dispatched
        if seconds <= 0.0:
            return 0
        if self.num_waiting == 0 and len(self.prefilling) == 1:
            is_bounded = self.target.fixed_s is not None or len(batch.decodes) > 0
            length = next_chunk(cost, prefix, remaining, seconds, is_bounded)
        else:
            is_bounded = self.target.fixed_s is not None
            length = min(remaining, cost.longest_chunk(seconds, prefix))
        if length == remaining:
            return length
        tiles = (batch.num_tokens + length) / self.tile  # whole ones: what fills a part of one costs as much
        whole = max(1, math.floor(tiles) if is_bounded else round(tiles)) * self.tile - batch.num_tokens
        return min(remaining, whole) if whole > 0 else length

    def _chunk_length(self, batch: MicroBatch, prompt: Request, seconds: float) -> int:
        """Return the tokens of the next chunk of `prompt`, which adds about `seconds`; 0 for no chunk."""
        remaining = prompt.remaining_prefill
        least = min(remaining, max(1, int(SMALLEST_CHUNK * self.chunk)))
        if self._is_long(prompt):
            length = self._long_chunk_length(batch, prompt, seconds)
        else:
            length = self._short_chunk_length(batch, prompt, seconds)
        if length >= least:
            return length
        # Nothing may stand still: a micro-batch without a chunk takes a small one, unless its time is promised.
        is_promised = self.target.fixed_s is not None and batch.decodes
        return 0 if batch.chunks or is_promised else least

    def _short_chunk_length(self, batch: MicroBatch, prompt: Request, seconds: float) -> int:
        """Return the tokens of the next chunk of a prompt that is not long, which adds about `seconds`; 0 for none."""
        remaining = prompt.remaining_prefill
        room = self.target.cost.longest_chunk(seconds, prompt.num_dispatched)
        length = min(remaining, max(0, self._in_whole_tiles(batch, room) if self._is_coarse else room))
        if length < remaining:
            overhang = (batch.num_tokens + length) % self.tile
            if overhang <= _TILE_ALIGNMENT_LOSS * length:
                length -= overhang
            if length and self.num_waiting == 0 and len(self.prefilling) == 1:
                length = -(-remaining // -(-remaining // length))  # equal chunks
        return length

    def _in_whole_tiles(self, batch: MicroBatch, room: int) -> int:
        """Return the tokens, near `room`, that fill the micro-batch up to whole tiles, a chunk's at most."""
        tiles = (batch.num_tokens + room) / self.tile
        whole = math.floor(tiles) if self.target.fixed_s is not None else round(tiles)
        return max(1, min(whole, self.chunk // self.tile)) * self.tile - batch.num_tokens

    def draft_room(self, batch: MicroBatch) -> int:
        """Up to the tile, and no more than fit into what decodes and chunks have left of the time."""
        cost = self.target.cost
        a_row = cost.per_token + cost.per_row
        room = super().draft_room(batch)
        return min(room, int(self._left_s / a_row)) if a_row > 0.0 else room

    @property
    def _is_coarse(self) -> bool:
        """Whether a chunk is so few tiles that time grows in steps of a tile."""
        return self.tile <= self.chunk <= _COARSE_TILES * self.tile

    @property
    def _free_slots(self) -> int | None:
        """Slots that waiting prompts could take; None if no prompt waits."""
        if not self.num_waiting:
            return None
        return 0 if self.short_of_kv else max(0, self.slots - len(self.running))

    @property
    def _tokens_a_round(self) -> int:
        """Tokens of whole chunks, one in each micro-batch in flight."""
        return self._least_depth * self.chunk

    @property
    def _least_depth(self) -> int:
        return self.limits.depth.least

    @property
    def depth(self) -> int:
        """One more in flight makes tokens wait, so it must pay: below saturation stages idle anyway, and where slots or
        blocks lack, so that prompts do not fill micro-batches, it only deals the same decodes over more of them. While
        there are only decodes, it is the number over which they come round the soonest."""
        if not self.backlog:
            return self._dealer.groups
        is_deeper = self._prompts.is_long and self.target.typical.is_full and self._turnaround.is_long
        return self.limits.depth.most if is_deeper else self._least_depth

    def _learn(self) -> None:
        """Take over what has been learned since the last micro-batch: the slowest stage's cost, and the chunk."""
        self.target.refresh(self.chunk, self._free_slots)
        if note := self.picker.update(self._turn, self.queue_snapshot):
            self.notes.append(note)
        self.chunk = self._grown_chunk()
        self._prompts.observe(self.backlog, self._tokens_a_round)
        self._dealer.survey(self._turn, self.running.values(), self.target.cost, self.target.stages, self.fits.step)

    def _grown_chunk(self) -> int:
        """Return the chunk, grown if prompts pile up. Within a round it stays, so that micro-batches are alike."""
        chunk = self.picker.chunk
        if self._growth is None or not self.picker.is_settled:
            return chunk
        if self.prefilling:  # a prompt longer than all that waits behind it is no pile: orders let others overtake it
            first = self.prefilling[0]
            if first.prefill_target > self.backlog - first.remaining_prefill:
                return chunk
        if self._turn % self._least_depth and self.chunk >= chunk:
            return self.chunk
        return self._growth.grown(self._turn, chunk, self.queue_snapshot(), self.target.typical.decodes)

    def predict(self, micro_batch: MicroBatchRecord) -> list[float] | None:
        return self.fits.predict(micro_batch)

    def observe(self, micro_batch: MicroBatchRecord, spans: Sequence[Span]) -> None:
        self.fits.observe(micro_batch, spans)
        self.picker.observe(micro_batch, spans)
        if self.picker.is_settled and self.depth == self._least_depth:
            self._turnaround.observe(micro_batch, spans)

    def finish(self, request: Request, reason: str) -> None:
        self.picker.finished(request)
        super().finish(request, reason)

    @property
    def stage_times(self) -> list[list[float]] | None:
        return self.fits.by_stage
