"""SARATHI (arXiv 2308.16369, section 4): one chunk of one prompt, and the decodes that ride along with it."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from collections.abc import Sequence

from mypy_extensions import mypyc_attr

from ....conf.policies import SarathiConfig
from ...core.block_pool import BlockPool
from ...core.messages import Span
from ...core.micro_batch import MicroBatch
from ...core.request import Request
from ...core.run_record import MicroBatchRecord
from ..base import Limits, Scheduler
from ..learned.chunk_picker import ChunkPicker
from ..learned.decode_dealer import DecodeDealer
from ..learned.rival_fits import RivalFits
from ..learned.target_time import TargetTime


@mypyc_attr(allow_interpreted_subclasses=True)
class Sarathi(Scheduler):
    """Decode-maximal batching: one chunk and up to B - 1 ready decodes; without a prompt, up to B decodes.

    Chunk and decodes together come to at most `chunk` tokens and to a multiple of the tile (4.4). The last chunk of a
    prompt is all that is left of it: cut to whole tiles, it would pad as many rows and take one micro-batch more.
    Chunks of one prompt may follow each other through the pipeline, because the next chunk needs no sampled token.
    With `chunk=auto` the spans of the run show what saturates a stage.

    With `balance_decodes` a micro-batch takes its share of all decodes instead of every ready one, so that they do not
    gather in one micro-batch while the others run short. Shares are alike in predicted time. While there are decodes
    only, they are dealt over fewer micro-batches where these come round sooner.
    """

    def __init__(self, config: SarathiConfig, limits: Limits, pool: BlockPool) -> None:
        super().__init__(config, limits, pool)
        self.tile = config.tile or limits.tile
        self.picker = ChunkPicker(config.chunk, self.tile, limits.stages)
        most = limits.depth.most
        self.fits = RivalFits(limits.stages, self.tile, most, None) if config.balance_decodes else None
        self._target = TargetTime(None, self.picker.chunk, self.fits) if self.fits else None
        self._dealer = DecodeDealer(most)

    def fill(self, batch: MicroBatch) -> None:
        if note := self.picker.update(self._turn, self.queue_snapshot):
            self.notes.append(note)
        prompt = self.next_prompt()
        most = min(self.limits.batch, self.picker.chunk) - 1 if prompt else self.limits.batch
        self.take_decodes(batch, self._share(most, prompt is not None) if self._target else most)
        if prompt:
            self.take_chunk(batch, prompt, self.chunk_length(prompt.remaining_prefill, len(batch.decodes)))
        elif self._target and not batch:
            self.take_decodes(batch, 1)  # no decode of this micro-batch's share is ready
        self.picker.filled(batch)

    def _share(self, most: int, has_chunk: bool) -> int:
        """Return how many of the ready decodes go into the next micro-batch, which has room for `most`."""
        target = self._target
        assert target is not None
        target.refresh(self.picker.chunk, None)
        self._dealer.survey(self._turn, self.running.values(), target.cost, target.stages, target.fits.step)
        num_decodes = len(self.running) - len(self.prefilling)
        seconds = target.seconds(self.picker.chunk, None) if has_chunk else None
        return self._dealer.share(self.ready, self.depth, num_decodes, most, seconds)

    @property
    def depth(self) -> int:
        """As many as the pipeline takes, but with decodes only the number over which they come round the soonest."""
        return self.limits.depth.most if self.backlog else self._dealer.groups

    def predict(self, micro_batch: MicroBatchRecord) -> list[float] | None:
        return self.fits.predict(micro_batch) if self.fits else None

    def chunk_length(self, remaining: int, num_decodes: int) -> int:
        """Return the tokens of the chunk that goes with `num_decodes` decodes, of a prompt with `remaining` tokens."""
        tokens = self.picker.chunk
        whole = tokens - tokens % self.tile
        return min(remaining, (whole if whole > num_decodes else tokens) - num_decodes)

    def draft_room(self, batch: MicroBatch) -> int:
        """Up to the tile, and beside a chunk up to `chunk` tokens in all."""
        room = super().draft_room(batch)
        return min(room, self.picker.chunk - batch.num_tokens) if batch.chunks else room

    def observe(self, micro_batch: MicroBatchRecord, spans: Sequence[Span]) -> None:
        self.picker.observe(micro_batch, spans)
        if self.fits:
            self.fits.observe(micro_batch, spans)

    @property
    def stage_times(self) -> list[list[float]] | None:
        return self.fits.by_stage if self.fits else None

    def finish(self, request: Request, reason: str) -> None:
        self.picker.finished(request)
        super().finish(request, reason)
