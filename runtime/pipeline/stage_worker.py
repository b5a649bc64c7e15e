"""One rank's share of a micro-batch: updates block tables, runs the stage; on the last stage, samples."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...models.batch import Decodes, RaggedBatch, Segment
from ...models.block_tables import BlockTables
from ...models.build_stage import build_stage
from ...models.cuda_graphs import capture_graphs
from ...models.piecewise import PiecewiseStage
from ...models.sampling import PendingTokens, Sampler
from ...models.stage import Stage, StageInputs
from ..core.columns import unpack
from ..core.messages import MicroBatchMessage, Sampled, TokenLogprobs
from .handshake import Setup

if TYPE_CHECKING:
    from ...parallel.groups import Groups


class StageWorker:
    """Runs micro-batches in order on one rank. Only tensor-parallel rank 0 of the last stage samples."""

    def __init__(self, stage: Stage, cuda_graphs: bool = False) -> None:
        self.stage = stage
        self._forward = PiecewiseStage(stage, capture_graphs).forward if cuda_graphs else stage
        mesh = stage.mesh
        self._sampler = Sampler(stage.arch.vocab_size) if mesh.is_last and mesh.tp_rank == 0 else None
        self._tables = BlockTables()

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
        return cls(stage, setup.model.cuda_graphs and groups.device.type == "cuda")

    def prepare(self, micro_batch: MicroBatchMessage) -> StageInputs:
        """Update block tables from a micro-batch, and make the stage's inputs of it.

        Micro-batches must be prepared in their order. Another one may be computed or sampled meanwhile.
        """
        tables = self._tables
        for request in micro_batch.dropped:
            tables.drop(request)
        for new in micro_batch.new:
            tables.add(new.request)
        parts: list[Any] = []
        sample_rows: list[int] = []
        chunks = []
        row = 0
        for chunk in micro_batch.chunks:
            tables.append(chunk.request, chunk.blocks)
            parts.append(chunk.tokens)
            chunks.append(Segment(chunk.start, len(chunk.tokens), tables.of(chunk.request)))
            row += len(chunk.tokens)
            if chunk.sample:
                sample_rows.append(row - 1)
        message = micro_batch.decodes
        for request, blocks in message.blocks.items():
            tables.append(request, blocks)
        starts = np.frombuffer(message.starts, dtype=np.int64)
        most = int(starts.max()) // self.stage.cache.block_size + 1 if len(starts) else 0
        decodes = Decodes(starts, tables.of_each(unpack(message.requests).tolist(), most))
        parts.append(np.frombuffer(message.tokens, dtype=np.int64))
        rows = np.concatenate([sample_rows, np.arange(row, row + len(starts))]).astype(np.int64)
        return self.stage.prepare(RaggedBatch(np.concatenate(parts, dtype=np.int64), chunks, decodes, rows))

    def forward(self, inputs: StageInputs, hidden_TH: torch.Tensor | None) -> torch.Tensor:
        """Compute the hidden states [T, H]; on the last stage the logits [R, V] of the rows that need a token."""
        return self._forward(inputs, hidden_TH)

    def sample(self, micro_batch: MicroBatchMessage, logits_RV: torch.Tensor) -> Sampled:
        """Sample as `queue_sampling` does, and wait for the tokens."""
        return self.queue_sampling(micro_batch, logits_RV).read()

    def queue_sampling(self, micro_batch: MicroBatchMessage, logits_RV: torch.Tensor) -> PendingSampled:
        """Queue the sampling of a token for each segment of the micro-batch that needs one. The host does not wait.

        It must be called for each micro-batch in their order, since penalties go by the tokens that came before.
        """
        sampler, decodes = self._sampler, micro_batch.decodes
        assert sampler is not None
        for request in micro_batch.dropped:
            sampler.drop(request)
        for new in micro_batch.new:
            sampler.add(new.request, new.sampling, new.seed, new.prompt_len, new.eos_token_ids)
            sampler.feed(new.request, 0, new.past)
        if sampler.keeps_past:
            for segment in chain(micro_batch.chunks, decodes):
                sampler.feed(segment.request, segment.start, segment.tokens)
        ends = [chunk for chunk in micro_batch.chunks if chunk.sample]
        requests = [chunk.request for chunk in ends] + unpack(decodes.requests).tolist()
        positions = [chunk.start + len(chunk.tokens) for chunk in ends] + [n + 1 for n in unpack(decodes.starts)]
        return PendingSampled(sampler.queue(logits_RV, requests, positions))


class PendingSampled:
    """The tokens of a micro-batch that are being sampled on the device."""

    def __init__(self, tokens: PendingTokens) -> None:
        self._tokens = tokens

    def read(self) -> Sampled:
        """Wait for the tokens, in the order of the micro-batch's segments. Any thread may call it."""
        sampled = self._tokens.read()
        logprobs = {
            place: TokenLogprobs(token.logprob, token.rank, token.top)
            for place, token in enumerate(sampled)
            if token.logprob is not None and token.rank is not None
        }
        return Sampled([token.token for token in sampled], logprobs)
