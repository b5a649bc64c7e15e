"""One rank's share of a micro-batch: updates block tables and sampler history, runs the stage, samples on the last."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import torch

from ...models.batch import RaggedBatch, Segment
from ...models.build_stage import build_stage
from ...models.sampling import Sampler
from ...models.stage import Stage, StageInputs
from ..core.columns import unpack
from ..core.messages import DecodesMessage, MicroBatchMessage, Sampled, SegmentMessage, TokenLogprobs
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
        token_ids: list[int] = []
        sample_rows: list[int] = []
        chunks = []
        for chunk in micro_batch.chunks:
            token_ids += chunk.tokens
            if chunk.sample:
                sample_rows.append(len(token_ids) - 1)
            chunks.append(self._chunk(chunk))
        num_chunk_tokens = len(token_ids)
        decodes = self._decodes(micro_batch.decodes, token_ids)
        sample_rows += range(num_chunk_tokens, len(token_ids))
        batch = RaggedBatch(token_ids=token_ids, chunks=chunks, decodes=decodes, sample_rows=sample_rows)
        return self.stage.prepare(batch)

    def _chunk(self, chunk: SegmentMessage) -> Segment:
        blocks = self._blocks[chunk.request]
        blocks += chunk.blocks
        if self._sampler:
            self._sampler.feed(chunk.request, chunk.start, chunk.tokens)
        return Segment(chunk.start, len(chunk.tokens), blocks)

    def _decodes(self, decodes: DecodesMessage, token_ids: list[int]) -> list[Segment]:
        """Make the segments of the decodes, and append their tokens to `token_ids`."""
        tables = self._blocks
        for request, blocks in decodes.blocks.items():
            tables[request] += blocks
        requests, starts = unpack(decodes.requests).tolist(), unpack(decodes.starts).tolist()
        tokens = unpack(decodes.tokens).tolist()
        if self._sampler:
            for request, start, token in zip(requests, starts, tokens, strict=True):
                self._sampler.feed(request, start, [token])
        token_ids += tokens
        return [Segment(start, 1, tables[request]) for request, start in zip(requests, starts, strict=True)]

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
