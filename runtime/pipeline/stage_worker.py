"""One rank's share of a micro-batch: updates block tables and sampler history, runs the stage, samples on the last."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import torch

from ...models.batch import RaggedBatch, Segment
from ...models.build_stage import build_stage
from ...models.sampling import Sampler
from ...models.stage import Stage, StageInputs
from ..core.messages import MicroBatchMessage, Sampled, SegmentMessage, TokenLogprobs
from .handshake import Setup

if TYPE_CHECKING:
    from ...parallel.groups import Groups


class StageWorker:
    """Runs micro-batches in order on one rank. Only tensor-parallel rank 0 of the last stage samples."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        mesh = stage.mesh
        self._sampler = Sampler(stage.arch.vocab_size) if mesh.is_last and mesh.tp_rank == 0 else None
        self._blocks: dict[int, list[int]] = {}

    @classmethod
    def build(cls, setup: Setup, groups: Groups) -> StageWorker:
        """Build and load this rank's stage.

        Raises:
            ConfigError: the checkpoint or the attention backend cannot be used.
        """
        stage = build_stage(
            setup.model,
            setup.arch,
            groups,
            range(*setup.layers[groups.mesh.stage]),
            num_blocks=setup.num_blocks,
            block_size=setup.block_size,
            replicate_embedding=setup.replicate_embedding,
            seed=setup.seed,
        )
        stage.pack()
        return cls(stage)

    def prepare(self, micro_batch: MicroBatchMessage) -> StageInputs:
        """Update block tables and sampler history from a micro-batch, and make the stage's inputs of it."""
        for request in micro_batch.dropped:
            del self._blocks[request]
            if self._sampler:
                self._sampler.drop(request)
        for new in micro_batch.new:
            self._blocks[new.request] = []
            if self._sampler:
                self._sampler.add(new.request, new.sampling, new.seed, new.prompt_len, new.eos_token_ids)
        sample_rows = []
        row = 0
        for segment in chain(micro_batch.chunks, micro_batch.decodes):
            row += len(segment.tokens)
            if segment.sample:
                sample_rows.append(row - 1)
        batch = RaggedBatch(
            token_ids=[token for segment in chain(micro_batch.chunks, micro_batch.decodes) for token in segment.tokens],
            chunks=[self._segment(segment) for segment in micro_batch.chunks],
            decodes=[self._segment(segment) for segment in micro_batch.decodes],
            sample_rows=sample_rows,
        )
        return self.stage.prepare(batch)

    def _segment(self, segment: SegmentMessage) -> Segment:
        blocks = self._blocks[segment.request]
        blocks += segment.blocks
        if self._sampler:
            self._sampler.feed(segment.request, segment.start, segment.tokens)
        return Segment(segment.start, len(segment.tokens), blocks)

    def forward(self, inputs: StageInputs, hidden_TH: torch.Tensor | None) -> torch.Tensor:
        """Compute the hidden states [T, H]; on the last stage the logits [R, V] of the rows that need a token."""
        return self.stage(inputs, hidden_TH)

    def sample(self, micro_batch: MicroBatchMessage, logits_RV: torch.Tensor) -> Sampled:
        """Sample a token for each segment of the micro-batch that needs one, in order."""
        assert self._sampler is not None
        segments = [s for s in chain(micro_batch.chunks, micro_batch.decodes) if s.sample]
        if not segments:
            return Sampled([])
        tokens = self._sampler.sample(
            logits_RV, [s.request for s in segments], [s.start + len(s.tokens) for s in segments]
        )
        logprobs = {
            place: TokenLogprobs(t.logprob, t.rank, t.top)
            for place, t in enumerate(tokens)
            if t.logprob is not None and t.rank is not None
        }
        return Sampled([t.token for t in tokens], logprobs)
