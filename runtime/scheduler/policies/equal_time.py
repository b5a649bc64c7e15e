"""Our policy: micro-batches of equal predicted time. SARATHI makes them equal in tokens, which is not the same."""

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
from ..base import Scheduler
from ..chunked import ChunkedScheduler
from ..learned.chunk_growth import ChunkGrowth
from ..learned.decode_dealer import DecodeDealer
from ..learned.long_prompt import next_chunk
from ..learned.rival_fits import RivalFits
from ..learned.target_time import TargetTime
from ..learned.turnaround import Turnaround
from ..limits import Limits

_TILE_ALIGNMENT_LOSS = 0.05  # share of a chunk given up to align it to the tile; more makes times unequal
_LONG_ROUNDS = 8  # a prompt that takes more rounds of whole chunks is long
_SMALLEST_CHUNK = 1 / 16  # share of a whole chunk; a smaller chunk is not worth its overhead
_COARSE_TILES = 4  # chunks of at most this many tiles are cut to whole tiles


@mypyc_attr(allow_interpreted_subclasses=True)
class EqualTime(ChunkedScheduler):
    """Each micro-batch is filled to the same predicted time of the slowest stage.

    Decodes come first, distributed over the depth by predicted time. While there are only decodes, they are distributed
    over fewer micro-batches if that shortens the time between tokens. Prompt chunks fill the remaining time, so a chunk
    shrinks as its prefix and the decodes' contexts grow. If a prompt ends early, the first chunk of the next prompt
    fills the micro-batch up. If no other prompt waits, the rest of a prompt is cut into equal chunks instead of whole
    chunks and a tiny tail. Chunks of one prompt follow each other through the pipeline.

    With `chunk=auto`, the target time for a lone prompt that takes many rounds minimizes its TTFT.

    If a chunk is only a few tiles long, time grows in steps of a tile, so a micro-batch is rounded to whole tiles
    (paper 4.4), up to `chunk` tokens.

    While more prompt tokens wait than `iterations` micro-batches take, the chunk grows, up to `max_prefill_tokens`.
    This raises throughput and shortens TTFT at the expense of TBT. With a `target_ms` the chunk does not grow.

    The target time is `target_ms`, else the time of a typical micro-batch of `chunk` tokens. Stage times are learned
    from the run's spans; until the first fit, token counts stand in for time. The depth is the number of stages, plus
    one while even the busiest stage idles although prompts wait and fill micro-batches.
    """

    def __init__(self, config: EqualTimeConfig, limits: Limits, pool: BlockPool) -> None:
        super().__init__(config, limits, pool)
        self._growth: ChunkGrowth | None = None
        if config.iterations is not None and config.target_ms is None:
            self._growth = ChunkGrowth(config.iterations, config.max_prefill_tokens, self.limits.tile)
        self.fits = RivalFits(limits.num_stages, self.limits.tile, self._least_depth)
        target_s = None if config.target_ms is None else config.target_ms / 1e3
        self.target = TargetTime(target_s, self.fits)
        self._turnaround = Turnaround(limits.num_stages)
        self._dealer = DecodeDealer(self._least_depth)
        self._left_s = 0.0  # of the last micro-batch's target time, after its chunks

    def fill(self, batch: MicroBatch) -> None:
        """Take this micro-batch's share of decodes, then chunks that fill the remaining predicted time."""
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
        """Return the target time of a micro-batch whose first chunk is from `prompt`."""
        overhead = self.picker.overhead
        if prompt and overhead and len(self.running) == 1 and not self.num_waiting and self._is_long(prompt):
            return self.target.alone(prompt.prefill_target, overhead, self.limits.num_stages)
        return self.target.seconds(self.chunk)

    def _is_long(self, prompt: Request) -> bool:
        """Return whether a prompt takes so many rounds that it is cut by predicted time alone."""
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
        tile = self.limits.tile
        tiles = (batch.num_tokens + length) / tile  # whole tiles: a partly filled one costs as much
        whole = max(1, math.floor(tiles) if is_bounded else round(tiles)) * tile - batch.num_tokens
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
        # Keep prefill moving: add a small chunk to a micro-batch without one, unless a target time forbids it.
        is_promised = self.target.fixed_s is not None and batch.decodes
        return 0 if batch.chunks or is_promised else least

    def _short_chunk_length(self, batch: MicroBatch, prompt: Request, seconds: float) -> int:
        """Return the tokens of the next chunk of a prompt that is not long, which adds about `seconds`; 0 for none."""
        remaining = prompt.remaining_prefill
        room = self.target.cost.longest_chunk(seconds, prompt.num_dispatched)
        length = min(remaining, max(0, self._in_whole_tiles(batch, room) if self._is_coarse else room))
        if length < remaining:
            overhang = (batch.num_tokens + length) % self.limits.tile
            if overhang <= _TILE_ALIGNMENT_LOSS * length:
                length -= overhang
            if length and self.num_waiting == 0 and len(self.prefilling) == 1:
                length = -(-remaining // -(-remaining // length))  # equal chunks
        return length

    def _in_whole_tiles(self, batch: MicroBatch, room: int) -> int:
        """Return the tokens, about `room`, that fill the micro-batch to whole tiles, up to `chunk` tokens in total."""
        tile = self.limits.tile
        tiles = (batch.num_tokens + room) / tile
        whole = math.floor(tiles) if self.target.fixed_s is not None else round(tiles)
        return max(1, min(whole, self.chunk // tile)) * tile - batch.num_tokens

    def draft_room(self, batch: MicroBatch) -> int:
        """Return the draft tokens that fit up to the tile and into the time that decodes and chunks have left."""
        cost = self.target.cost
        a_row = cost.per_token + cost.per_row
        room = Scheduler.draft_room(self, batch)
        return min(room, int(self._left_s / a_row)) if a_row > 0.0 else room

    @property
    def _is_coarse(self) -> bool:
        """Whether a chunk is so few tiles that time grows in steps of a tile."""
        return self.limits.tile <= self.chunk <= _COARSE_TILES * self.limits.tile

    @property
    def _least_depth(self) -> int:
        return self.limits.depth.least

    @property
    def depth(self) -> int:
        """Maximum number of micro-batches in flight, chosen by the state of the queues.

        One more in flight delays tokens, so it must pay off. Below saturation stages idle anyway. If slots or blocks
        run short, so that prompts do not fill micro-batches, it only spreads the same decodes over more of them. While
        there are only decodes, the depth is the number that minimizes the time between tokens.
        """
        if not self.backlog:
            return self._dealer.groups
        is_deeper = self.target.typical.is_full and self._turnaround.is_long
        return self.limits.depth.most if is_deeper else self._least_depth

    def prepare(self) -> None:
        """Adopt what has been learned since the last micro-batch: the slowest stage's cost, and the chunk size."""
        self.target.refresh(self.chunk)
        last = self.chunk
        super().prepare()
        self.chunk = self._grown_chunk(last)
        self._dealer.survey(self._turn, self.running.values(), self.target.cost, self.target.stages, self.fits.step)

    def _grown_chunk(self, last: int) -> int:
        """Return the chunk size, grown if prompts pile up. It stays `last` within a round of micro-batches."""
        chunk = self.chunk
        if self._growth is None or not self.picker.is_settled:
            return chunk
        if self.prefilling:  # one prompt longer than all behind it is no pile-up: others may overtake it
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
        """Learn the stage times, which chunk size to pick, and the turnaround time."""
        super().observe(micro_batch, spans)
        self.fits.observe(micro_batch, spans)
        if self.picker.is_settled and self.depth == self._least_depth:
            self._turnaround.observe(micro_batch, spans)

    @property
    def stage_weights(self) -> list[list[float]] | None:
        """See `Scheduler.stage_weights`."""
        return self.fits.by_stage
