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
from ..chunked import ChunkedScheduler
from ..learned.chunk_growth import ChunkGrowth
from ..learned.decode_dealer import DecodeDealer
from ..learned.long_prompt import next_chunk
from ..learned.rival_fits import RivalFits
from ..learned.stage_fit import read_profile
from ..learned.target_time import TargetTime
from ..learned.turnaround import Turnaround

_TILE_ALIGNMENT_LOSS = 0.05  # of a chunk is given up for a multiple of the tile; more would make the times unequal
_LONG_ROUNDS = 8  # rounds of whole chunks that make a prompt long
_SMALLEST_CHUNK = 1 / 16  # of a whole one: a smaller chunk is not worth its overhead
_COARSE_TILES = 4  # most tiles of a chunk that holds whole ones


@mypyc_attr(allow_interpreted_subclasses=True)
class EqualTime(ChunkedScheduler):
    """Each micro-batch is filled to the same predicted time of the slowest stage.

    Decodes come first, dealt over the depth by predicted time. While there are decodes only, they are dealt over fewer
    micro-batches where these come round sooner. Chunks fill what is left of the time, so
    that a chunk shrinks as its prefix and the decodes' contexts grow. Where a prompt ends early, the first chunk of the
    next one fills up. Where no other prompt waits, the rest of a prompt is cut into equal chunks, not into whole ones
    and a tiny tail. Chunks of one prompt follow each other through the pipeline.

    A prompt of many rounds that is alone, with `chunk=auto`, has the time with which its first token comes the soonest.

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
        self._growth: ChunkGrowth | None = None
        if config.iterations is not None and config.target_ms is None:
            self._growth = ChunkGrowth(config.iterations, config.max_prefill_tokens, self.tile)
        profile = read_profile(config.profile, limits.stages)
        self.fits = RivalFits(limits.stages, self.tile, self._least_depth, profile)
        target_s = None if config.target_ms is None else config.target_ms / 1e3
        self.target = TargetTime(target_s, self.fits)
        self._turnaround = Turnaround(limits.stages)
        self._dealer = DecodeDealer(self._least_depth)
        self._left_s = 0.0  # of the time of the last micro-batch, after its chunks

    def fill(self, batch: MicroBatch) -> None:
        """Take the share of decodes that is due, then a chunk for what is left of the predicted time."""
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

    def _target_seconds(self, prompt: Request | None) -> float:
        """Return the time that a micro-batch is filled to whose first chunk is of `prompt`."""
        overhead = self.picker.overhead
        if prompt and overhead and len(self.running) == 1 and not self.num_waiting and self._is_long(prompt):
            return self.target.alone(prompt.prefill_target, overhead, self.limits.stages)
        return self.target.seconds(self.chunk)

    def _is_long(self, prompt: Request) -> bool:
        """Return whether a prompt runs for so many rounds that it is cut by predicted time alone."""
        return self.fits.is_fitted and prompt.prefill_target > _LONG_ROUNDS * self._least_depth * self.chunk

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
        least = min(remaining, max(1, int(_SMALLEST_CHUNK * self.chunk)))
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
        """Return the tokens up to the tile, and no more than fit into what decodes and chunks have left of the time."""
        cost = self.target.cost
        a_row = cost.per_token + cost.per_row
        room = Scheduler.draft_room(self, batch)
        return min(room, int(self._left_s / a_row)) if a_row > 0.0 else room

    @property
    def _is_coarse(self) -> bool:
        """Whether a chunk is so few tiles that time grows in steps of a tile."""
        return self.tile <= self.chunk <= _COARSE_TILES * self.tile

    @property
    def _least_depth(self) -> int:
        return self.limits.depth.least

    @property
    def depth(self) -> int:
        """Bound on the micro-batches in flight, picked for what is in the queues.

        One more in flight makes tokens wait, so it must pay: below saturation stages idle anyway, and where slots or
        blocks lack, so that prompts do not fill micro-batches, it only deals the same decodes over more of them. While
        there are only decodes, it is the number over which they come round the soonest.
        """
        if not self.backlog:
            return self._dealer.groups
        is_deeper = self.target.typical.is_full and self._turnaround.is_long
        return self.limits.depth.most if is_deeper else self._least_depth

    def prepare(self) -> None:
        """Take over what has been learned since the last micro-batch: the slowest stage's cost, and the chunk."""
        self.target.refresh(self.chunk)
        last = self.chunk
        super().prepare()
        self.chunk = self._grown_chunk(last)
        self._dealer.survey(self._turn, self.running.values(), self.target.cost, self.target.stages, self.fits.step)

    def _grown_chunk(self, last: int) -> int:
        """Return the chunk, grown if prompts pile up. Within a round it stays `last`, so micro-batches are alike."""
        chunk = self.chunk
        if self._growth is None or not self.picker.is_settled:
            return chunk
        if self.prefilling:  # a prompt longer than all that waits behind it is no pile: orders let others overtake it
            first = self.prefilling[0]
            if first.prefill_target > self.backlog - first.remaining_prefill:
                return chunk
        if self._turn % self._least_depth and last >= chunk:
            return last
        return self._growth.grown(self._turn, chunk, self.queue_snapshot(), self.target.typical.decodes)

    def predict(self, micro_batch: MicroBatchRecord) -> list[float] | None:
        """See `Scheduler.predict`."""
        return self.fits.predict(micro_batch)

    def observe(self, micro_batch: MicroBatchRecord, spans: Sequence[Span]) -> None:
        """Learn the times of stages, which chunk to pick, and how long a turnaround takes."""
        super().observe(micro_batch, spans)
        self.fits.observe(micro_batch, spans)
        if self.picker.is_settled and self.depth == self._least_depth:
            self._turnaround.observe(micro_batch, spans)

    @property
    def stage_weights(self) -> list[list[float]] | None:
        """See `Scheduler.stage_weights`."""
        return self.fits.by_stage
