"""Micro-batches of equal predicted time: ours. SARATHI makes them equal in tokens, which is not the same."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from mypy_extensions import mypyc_attr

from ....conf.policies import EqualTimeConfig
from ...core.block_pool import BlockPool
from ...core.features import Features, features, weigh
from ...core.messages import Span
from ...core.micro_batch import MicroBatch
from ...core.request import Request
from ...core.run_record import MicroBatchRecord
from ..base import Limits, Scheduler
from ..learned.backlog import FEW, Backlog
from ..learned.chunk_picker import ChunkPicker
from ..learned.stage_times import StageTimes, read_profile
from ..learned.turnaround import Turnaround

_SMOOTH = 1 / 32  # weight of the newest micro-batch in what is typical
_AHEAD = 1.1  # of the rate at which prompts come in; each slot that is free adds as much
_OVERHANG = 0.05  # of a chunk is given up for a multiple of the tile; more would make the time unequal
_SELDOM = 2  # of so many rounds through the pipeline one is watched for what changes slowly
_CLEARLY = 1.25  # times smaller errors are clearly smaller
_OUTPUTS = 2  # times the mean output are set aside in the cache
_FULL = 0.9  # of whole chunks is full enough for one more micro-batch in flight
_SLOW = 1 / 256  # weight of the newest micro-batch in how full they are: a change of the depth costs a bubble
_COARSE = 4  # tiles a chunk, or fewer
_SLIVER = 16  # a chunk of under 1/16 of a whole one is not worth its overhead: the micro-batch stays that much shorter


@mypyc_attr(allow_interpreted_subclasses=True)
class EqualTime(Scheduler):
    """Each micro-batch is filled to the same predicted time of the slowest stage.

    Decodes first, dealt evenly over the depth. Then chunks: one shrinks as its prefix and as the decodes' contexts
    grow. Where a prompt ends early the next one's first chunk fills up; where no other waits, what is left of a prompt
    is cut into equal chunks rather than into whole ones and a tiny tail. Chunks of one prompt follow each other
    through the pipeline. Where a chunk is few tiles, times go up in their micro-batches and a micro-batch holds whole
    ones (paper 4.4): the number nearest to what fills it, at most a chunk's. While few prompts wait, one micro-batch of
    each round has a tile less: the time between a request's tokens is a round's, and stages would idle for it later
    anyway.

    The time to fill to is `target_ms`, else what a micro-batch of `chunk` tokens takes with the decodes and prefixes
    that have been typical of late. Stage times are learned from the run's own spans; until the first fit, tokens
    stand for time. The depth is that of the pipeline, and one more where even its busiest stage idles though prompts
    wait and fill micro-batches.
    """

    def __init__(self, config: EqualTimeConfig, limits: Limits, pool: BlockPool) -> None:
        super().__init__(config, limits, pool)
        profile = read_profile(config.profile, limits.stages)
        self._smooth = self.times = StageTimes(limits.stages, profile)
        self.tile = config.tile or limits.tile
        self._stepped = StageTimes(limits.stages, profile) if self.tile > 1 else None
        self.target_s = None if config.target_ms is None else config.target_ms / 1e3
        self.picker = ChunkPicker(config.chunk, self.tile, limits.stages)
        self._turnaround = Turnaround(limits.stages)
        self._cost = Cost(*Cost.TOKENS)
        self._fitted: object = None
        self._rows: dict[int, tuple[Features, Features]] = {}  # of micro-batches in flight: tokens as such, in tiles
        self._finished = self._outputs = 0  # requests, and their tokens
        # What is typical of a micro-batch with prompts.
        self._decodes = self._context = self._prefix = 0.0
        self._pace = 1.0 * self.picker.chunk  # prompt tokens of any micro-batch, while prompts wait
        self._fullness = 1.0  # the same as a share of a whole chunk
        self._prompts = Backlog()

    @property
    def depth(self) -> int:
        # Below saturation stages idle anyway, and one more in flight would only make tokens wait. Where slots or blocks
        # lack, so that prompts do not fill micro-batches, it would only deal the same decodes over more of them.
        deeper = self._prompts.is_long and self._fullness >= _FULL and self._turnaround.is_long
        return self.limits.depth if deeper else self._least_depth

    @property
    def _least_depth(self) -> int:
        return self.limits.least_depth or self.limits.depth

    @property
    def _round(self) -> int:
        """Tokens of a chunk in each micro-batch in flight."""
        return self._least_depth * self.picker.chunk

    def fill(self, batch: MicroBatch) -> None:
        self._refresh()
        self._prompts.observe(self.backlog, self._round)
        prompt = self.next_prompt()
        self.take_decodes(batch, min(self.decode_share, self.limits.batch - 1 if prompt else self.limits.batch))
        context = sum([r.num_dispatched for r in batch.decodes])
        left = self._target - self._cost.of_decodes(len(batch.decodes), context)
        while len(batch.chunks) + len(batch.decodes) < self.limits.batch and (prompt := self.next_prompt()):
            length = self._chunk_length(batch, prompt, left)
            if not length:
                break
            left -= self._cost.of_chunk(length, prompt.num_dispatched)
            self.take_chunk(batch, prompt, length)
            if prompt.remaining_prefill:
                break
        if not batch:
            self.take_decodes(batch, 1)  # whose turn it is has none ready
        if batch:
            self._remember(batch, context)
        self.picker.filled(batch)

    def reserved_tokens(self, request: Request) -> int:
        """The prompt and twice what outputs have come to so far: more than that is seldom, and then preempts."""
        if not self._finished:
            return request.max_len
        outputs = _OUTPUTS * self._outputs / self._finished
        return min(request.max_len, request.prefill_target + math.ceil(outputs))

    def predict(self, micro_batch: MicroBatchRecord) -> list[float] | None:
        rows = self._rows[micro_batch.micro_batch] = self._both(micro_batch)
        return self.times.predict(rows[self.times is self._stepped])

    def _both(self, micro_batch: MicroBatchRecord) -> tuple[Features, Features]:
        """Features with tokens as they are, and in whole tiles."""
        row = features(micro_batch)
        return row, (row[0], -(-row[1] // self.tile) * self.tile, row[2], row[3], row[4], row[5])

    def observe(self, micro_batch: MicroBatchRecord, spans: Sequence[Span]) -> None:
        smooth, stepped = self._rows.get(micro_batch.micro_batch) or self._both(micro_batch)
        stages, seconds = [s.stage for s in spans], [s.end - s.begin for s in spans]
        # Whole rounds: each micro-batch in flight has decodes of its own.
        seldom = micro_batch.micro_batch // self._least_depth % _SELDOM == 0
        is_stepped = self.times is self._stepped
        if seldom or not is_stepped:
            self._smooth.observe(smooth, stages, seconds)
        if self._stepped is not None and (seldom or is_stepped or not self._stepped.is_fitted):
            self._stepped.observe(stepped, stages, seconds)
        self.picker.observe(micro_batch, spans)
        if self.picker.is_settled and self.depth == self._least_depth:
            self._turnaround.observe(micro_batch, spans)
        if spans[-1].stage == self.limits.stages - 1:
            self._rows.pop(micro_batch.micro_batch, None)

    def finish(self, request: Request, reason: str) -> None:
        self.picker.finished(request)
        self._finished += 1
        self._outputs += request.num_output
        super().finish(request, reason)

    @property
    def stage_times(self) -> list[list[float]] | None:
        return self.times.by_stage

    @property
    def in_tiles(self) -> bool:
        """Whether a tile is so large a part of a chunk that its micro-batch is felt: micro-batches then hold whole
        tiles."""
        return self.tile <= self.picker.chunk <= _COARSE * self.tile

    def _refresh(self) -> None:
        """After a new fit: the slowest stage's cost is what micro-batches are filled by."""
        if self._stepped is not None and self._stepped.is_fitted:
            clearly = _CLEARLY if self.times is self._stepped else 1 / _CLEARLY
            self.times = self._stepped if self._stepped.noise < clearly * self._smooth.noise else self._smooth
        if self.times.by_stage is not self._fitted:
            self._fitted = self.times.by_stage
            busiest = max(self.times.by_stage or (), key=lambda w: Cost(*w).of(self._typical))
            self._cost = Cost(*busiest)
        if note := self.picker.update(self):
            self.notes.append(note)

    @property
    def _typical(self) -> Features:
        """Features of a micro-batch of `chunk` tokens, with decodes and prefix as they have been of late.

        Prompts that wait for a slot come at the rate at which decodes end, whatever the chunk: if that is less than
        `chunk` gives, spread evenly it makes equal micro-batches where whole chunks now and then would not.
        """
        chunk = self._whole
        if self.num_waiting:
            free = 0 if self.short_of_kv else max(0, self.slots - len(self.running))
            chunk = min(chunk, max(_AHEAD * (1 + free) * self._pace, self.picker.chunk / _SLIVER))
        return 1.0, chunk + self._decodes, chunk * self._prefix, chunk * chunk, self._context, self._decodes

    @property
    def _whole(self) -> float:
        """Prompt tokens of a typical micro-batch that is filled with them."""
        if self.target_s is not None and self.times.is_fitted:
            left = self.target_s - self._cost.of_decodes(round(self._decodes), round(self._context))
            return self._cost.chunk_within(left, round(self._prefix))
        return max(0.0, self.picker.chunk - self._decodes)

    @property
    def _is_short(self) -> bool:
        """Whether the next micro-batch is the one of its round that has a tile less."""
        return self._turn % self._least_depth == 0 and self.backlog <= FEW * self._round

    @property
    def _target(self) -> float:
        if self.target_s is not None and self.times.is_fitted:
            return self.target_s
        return self._cost.of(self._typical)

    def _chunk_length(self, batch: MicroBatch, prompt: Request, left: float) -> int:
        """Tokens of the next chunk of `prompt`, 0 for none, where `left` seconds are to be filled."""
        remaining = prompt.remaining_prefill
        least = min(remaining, max(1, self.picker.chunk // _SLIVER))
        room = self._cost.chunk_within(left, prompt.num_dispatched)
        if self.in_tiles:
            tiles = (batch.num_tokens + room) / self.tile
            whole = math.floor(tiles) if self.target_s is not None else round(tiles)
            most = self.picker.chunk // self.tile - self._is_short
            room = max(1, min(whole, most)) * self.tile - batch.num_tokens
        length = min(remaining, max(0, room))
        if length < remaining:
            overhang = (batch.num_tokens + length) % self.tile
            if overhang <= _OVERHANG * length:
                length -= overhang
            alone = self.num_waiting == 0 and len(self.prefilling) == 1
            if alone and length:
                length = -(-remaining // -(-remaining // length))
        if length < least:
            # Nothing may stand still: a micro-batch without a chunk takes a small one, unless its time is promised.
            promised = self.target_s is not None and batch.decodes
            length = 0 if batch.chunks or promised else least
        return length

    def _remember(self, batch: MicroBatch, context: int) -> None:
        tokens = batch.num_prefill_tokens
        self._pace += _SMOOTH * (tokens - self._pace)
        self._fullness += _SLOW * (min(1.0, tokens / max(1.0, self._whole)) - self._fullness)
        if not batch.chunks:
            return
        prefix = sum([c.start * c.length for c in batch.chunks]) / tokens
        weight = max(_SMOOTH, 1 / (1 + self._turn))
        self._decodes += weight * (len(batch.decodes) - self._decodes)
        self._context += weight * (context - self._context)
        self._prefix += weight * (prefix - self._prefix)


class Cost:
    """A stage's time as a function of what it is given, from the weights of `features.FEATURES`."""

    TOKENS: ClassVar[tuple[float, ...]] = (0.0, 1.0, 0.0, 0.0, 0.0, 0.0)  # tokens for time

    def __init__(self, constant: float, token: float, prefix: float, square: float, context: float, row: float) -> None:
        self.weights = constant, token, prefix, square, context, row

    def of(self, row: Features) -> float:
        return weigh(self.weights, row)

    def of_decodes(self, count: int, context: int) -> float:
        """Of a micro-batch that holds only decodes, over `context` tokens in sum."""
        constant, token, _, _, per_context, row = self.weights
        return constant + (token + row) * count + per_context * context

    def of_chunk(self, length: int, prefix: int) -> float:
        """What a chunk adds."""
        _, token, per_prefix, square, _, _ = self.weights
        return (token + per_prefix * prefix + square * length) * length

    def chunk_within(self, seconds: float, prefix: int) -> int:
        """The longest chunk that adds at most so much."""
        _, token, per_prefix, square, _, _ = self.weights
        linear = token + per_prefix * prefix
        if seconds <= 0.0:
            return 0
        # The stable root of square * n^2 + linear * n = seconds.
        root = linear + math.sqrt(linear * linear + 4 * square * seconds)
        return int(2 * seconds / root + 1e-9) if root > 0.0 else 1 << 30
