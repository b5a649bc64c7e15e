"""One rank's part of a micro-batch: updates block tables, runs the stage; on the last stage, samples its rows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...conf.errors import ConfigError
from ...conf.structured_outputs import StructuredOutputs
from ...models.batch import Decodes, RaggedBatch, Segment
from ...models.block_tables import BlockTables
from ...models.build_stage import build_stage
from ...models.cuda_graphs import capture_graphs
from ...models.experts.load import ExpertLoad
from ...models.grammar import Grammars
from ...models.graphed_stage import GraphedStage
from ...models.sampling import PendingTokens, SampledToken, Sampler, queue_logprobs
from ...models.stage import Stage, StageInputs
from ...models.token_masks import RowMasks, TokenMasks
from ...models.tokenizer import load_tokenizer
from ...models.transfers import upload
from ..core.columns import unpack
from ..core.messages import UNSEEN_TOKEN, MicroBatchMessage, Sampled, SegmentMessage, TokenLogprobs
from .handshake import Setup

if TYPE_CHECKING:
    from ...parallel.groups import Groups

OnPart = Callable[[str, bool], None]


class StageWorker:
    """Runs micro-batches in order on one rank. Ranks of the last stage each sample their share of the rows.

    Args:
        stage: the stage, with its weights loaded.
        cuda_graphs: whether to run CUDA graphs, which are captured now and at each `restart`.
        tokenizer: the path of the model's tokenizer, None for UTF-8 bytes. Structured outputs need it.
        on_part: called with the name of a startup part while it runs (False) and when it has finished (True).
    """

    def __init__(
        self,
        stage: Stage,
        cuda_graphs: bool = False,
        tokenizer: str | None = None,
        on_part: OnPart = lambda part, is_done: None,
    ) -> None:
        self.stage = stage
        self._graphs: GraphedStage | None = None
        self._cuda_graphs = cuda_graphs
        self._tokenizer = tokenizer
        self._on_part = on_part
        self._num_threads = torch.get_num_threads()
        self.expert_load = ExpertLoad(stage.layers, stage.decoder)
        self._grammars: Future[Grammars] | None = None  # from the first structured outputs on
        self._compiler = ThreadPoolExecutor(1, "grammars")
        self._init_requests()

    @classmethod
    def build(cls, setup: Setup, groups: Groups, on_part: OnPart = lambda part, is_done: None) -> StageWorker:
        """Build and load this rank's stage.

        Raises:
            ConfigError: the checkpoint or the attention backend cannot be used.
        """
        spec = setup.stages[groups.mesh.stage]
        stage = build_stage(spec, groups, lambda: on_part("weights", False))
        stage.pack()
        on_part("weights", True)
        graphs = spec.model.cuda_graphs and stage.runs_as_graphs
        return cls(stage, graphs, setup.tokenizer, on_part)

    def restart(self) -> None:
        """Drop all requests: their KV and their sampler state."""
        self.drop_graphs()
        self._init_requests()

    def drop_graphs(self) -> None:
        """Drop the CUDA graphs. NCCL cannot close a communicator while a graph that captured it exists."""
        if self._graphs is not None:
            self._graphs.drop()
            self._graphs = None

    def _init_requests(self) -> None:
        mesh = self.stage.mesh
        self._sampler = Sampler(self.stage.arch.vocab_size) if mesh.is_last else None
        self._sampled: tuple[Sequence[int], torch.Tensor | None] = [], None  # newest micro-batch: requests, [R] tokens
        self._tables = [BlockTables() for _ in self.stage.spec.windows]
        self._masks: dict[int, Future[RowMasks]] = {}  # by micro-batch, from prepared to sampled
        self._token_masks: TokenMasks | None = None  # from the first request with structured outputs on
        if self._cuda_graphs:
            self._graphs = GraphedStage(
                self.stage, partial(capture_graphs, on_work=lambda: self._on_part("capture", False))
            )
            self._on_part("capture", True)

    def prepare(self, micro_batch: MicroBatchMessage) -> StageInputs:
        """Update block tables from a micro-batch, and make the stage's inputs from it.

        Micro-batches must be prepared in order. Another one may be computed or sampled meanwhile. Only a micro-batch
        with unseen tokens must wait until the previous one's sampling is queued.
        """
        if self._sampler is not None:
            self._queue_masks(micro_batch)
        for tables in self._tables:
            for request in micro_batch.dropped:
                tables.drop(request)
            for new in micro_batch.new:
                tables.add(new.request)
        parts: list[Any] = []
        sample_rows: list[int] = []
        row = 0
        for chunk in micro_batch.chunks:
            self._append(chunk.request, chunk.blocks)
            parts.append(chunk.tokens)
            if chunk.targets:
                sample_rows += range(row, row + len(chunk.tokens))
            row += len(chunk.tokens)
            if chunk.sample and not chunk.targets:
                sample_rows.append(row - 1)
        message = micro_batch.decodes
        for request, blocks in message.blocks.items():
            self._append(request, blocks)
        starts = np.frombuffer(bytearray(message.starts), dtype=np.int64)  # torch takes no read-only arrays
        newest, sampled_R = np.frombuffer(message.tokens, dtype=np.int64), None
        if UNSEEN_TOKEN in newest:
            requests, sampled_R = self._sampled
            rows_of = {request: row for row, request in enumerate(requests)}
            pairs = zip(unpack(message.requests), newest.tolist(), strict=True)
            newest = np.array([-1 - rows_of[request] if token == UNSEEN_TOKEN else token for request, token in pairs])
        parts.append(newest)
        ids = np.concatenate(parts, dtype=np.int64)
        rows = np.concatenate([sample_rows, np.arange(row, row + len(starts))]).astype(np.int64)
        most = int(starts.max()) // self.stage.cache.block_size + 1 if len(starts) else 0
        decoding = unpack(message.requests).tolist()
        first, *others = (
            RaggedBatch(
                ids,
                [Segment(c.start, len(c.tokens), tables.of(c.request)) for c in micro_batch.chunks],
                Decodes(starts, tables.of_each(decoding, most)),
                rows,
            )
            for tables in self._tables
        )
        return self.stage.prepare(replace(first, others=others) if others else first, sampled_R)

    def _append(self, request: int, names: list[int]) -> None:
        """Append the blocks in a message to a request's block tables; each block number encodes its layer group."""
        if len(self._tables) == 1:
            self._tables[0].append(request, names)
            return
        groups, blocks = np.divmod(np.array(names, dtype=np.int64), self.stage.cache.num_blocks - 1)
        for group, tables in enumerate(self._tables):
            tables.append(request, blocks[groups == group])

    def compile(self, wanted: StructuredOutputs, on_done: Callable[[], None]) -> None:
        """Compile structured outputs in a thread, which calls `on_done` on success or failure."""
        grammars = self._begin_grammars()

        def run() -> None:
            with suppress(ConfigError):  # reported to requests that use them
                grammars.result().check(wanted)
            on_done()

        self._compiler.submit(run)

    def _begin_grammars(self) -> Future[Grammars]:
        if self._grammars is None:
            arch = self.stage.arch
            self._grammars = self._compiler.submit(
                lambda: Grammars(load_tokenizer(self._tokenizer, arch.vocab_size), arch.vocab_size, arch.eos_token_ids)
            )
        return self._grammars

    def _queue_masks(self, micro_batch: MicroBatchMessage) -> None:
        """Start to compute the token masks of structured outputs, which `queue_sampling` waits for."""
        wanted = [new for new in micro_batch.new if new.sampling.has_masks]
        masks = self._token_masks
        if masks is None or masks.is_empty:
            if not wanted:
                return
            if masks is None:
                masks = self._token_masks = TokenMasks(self._begin_grammars().result, self._num_threads)
        for request in micro_batch.dropped:
            masks.drop(request)
        for new in wanted:
            masks.add(new.request, new.sampling.structured_outputs, new.prompt_len, new.sampling.reasoning)
        past = [(new.request, 0, new.past) for new in wanted if new.past]
        segments = [(each.request, each.start, each.tokens) for each in chain(micro_batch.chunks, micro_batch.decodes)]
        pending = masks.advance([*past, *segments], self._own_rows(micro_batch).of(sampled_requests(micro_batch)))
        if pending is not None:
            self._masks[micro_batch.micro_batch] = pending

    def forward(self, inputs: StageInputs, hidden_TH: torch.Tensor | None) -> torch.Tensor:
        """Compute the hidden states [T, H], or on the last stage the logits of this rank's share of the rows.

        There is one row per token that the micro-batch samples, and one per token of chunks with targets.
        """
        forward = self.stage if self._graphs is None else self._graphs.forward
        return forward(inputs, hidden_TH)

    def sample(self, micro_batch: MicroBatchMessage, logits_RV: torch.Tensor) -> Sampled:
        """Sample as `queue_sampling` does, and wait for the tokens."""
        return self.queue_sampling(micro_batch, logits_RV).read()

    def queue_sampling(self, micro_batch: MicroBatchMessage, logits_RV: torch.Tensor) -> PendingSampled:
        """Queue the sampling of this rank's share of the rows, without a host sync.

        It must be called for every micro-batch in order, since penalties depend on the previous tokens.
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
        own = self._own_rows(micro_batch)
        ends = [chunk for chunk in micro_batch.chunks if chunk.sample]
        positions = [chunk.start + len(chunk.tokens) for chunk in ends] + [n + 1 for n in unpack(decodes.starts)]
        pending = self._masks.pop(micro_batch.micro_batch, None) if self._masks else None
        masks = None if pending is None else pending.result()
        prompts = None
        if any(chunk.targets for chunk in micro_batch.chunks):
            prompts, logits_RV = self._queue_prompts(micro_batch.chunks, own, sampler, logits_RV)
        requests = own.of(sampled_requests(micro_batch))
        tokens = sampler.queue(logits_RV, requests, own.of(positions), masks)
        self._sampled = requests, tokens.tokens_R
        return PendingSampled(own, tokens, prompts)

    def _own_rows(self, micro_batch: MicroBatchMessage) -> OwnRows:
        rows, num_rows = _sampling_rows(micro_batch)
        return OwnRows(self.stage.mesh.share_of(num_rows), rows, min(num_rows, self.stage.mesh.tp))

    def _queue_prompts(
        self, chunks: Sequence[SegmentMessage], own: OwnRows, sampler: Sampler, logits_RV: torch.Tensor
    ) -> tuple[PendingPrompts, torch.Tensor]:
        """Queue the log-probabilities of the chunks' targets; also return the logits of the rows that sample."""
        rows: list[int] = []
        tokens: list[int] = []
        num_tops: list[int] = []
        counts: dict[int, int] = {}
        first = 0  # row of the chunk's first target
        for place, chunk in enumerate(chunks):
            if chunk.targets:
                found = [row for row in range(first, first + len(chunk.targets)) if row in own.rows]
                rows += [row - own.rows.start for row in found]
                tokens += [chunk.targets[row - first] for row in found]
                num_tops += [sampler.params(chunk.request).prompt_logprobs or 0] * len(found)
                counts[place] = len(found)
            first += len(chunk.tokens) if chunk.targets else chunk.sample
        logits = logits_RV[:, : sampler.vocab_size]
        sampling = np.array([row - own.rows.start for row in own.of(own.sampling)], dtype=np.int64)
        prompts = PendingPrompts(queue_logprobs(logits, rows, tokens, num_tops), counts)
        (sampling_S,) = upload([sampling], logits_RV.device)
        return prompts, logits_RV[sampling_S]


@dataclass(frozen=True, slots=True)
class OwnRows:
    """One last-stage rank's rows of a micro-batch's logits.

    `sampling` lists all ranks' rows that a token is sampled from, ascending. `num_shares` ranks have rows.
    """

    rows: range
    sampling: Sequence[int]
    num_shares: int

    def of(self, each: Sequence[int]) -> Sequence[int]:
        """Return this rank's entries of `each`, which has one entry per sampled token."""
        return each[bisect_left(self.sampling, self.rows.start) : bisect_left(self.sampling, self.rows.stop)]


def _sampling_rows(micro_batch: MicroBatchMessage) -> tuple[Sequence[int], int]:
    """Return the rows of a micro-batch's logits that sample a token, and the total number of rows."""
    ends, num_rows = [], 0
    for chunk in micro_batch.chunks:  # with targets: all rows; else the last row, if it samples
        num_rows += len(chunk.tokens) if chunk.targets else chunk.sample
        if chunk.sample:
            ends.append(num_rows - 1)
    stop = num_rows + len(micro_batch.decodes)
    return [*ends, *range(num_rows, stop)], stop


def sampled_requests(micro_batch: MicroBatchMessage) -> list[int]:
    """Return the request of each token that a micro-batch samples, in order."""
    ends = [chunk.request for chunk in micro_batch.chunks if chunk.sample]
    return ends + unpack(micro_batch.decodes.requests).tolist()


class PendingSampled:
    """The tokens of a rank's rows that are being sampled on the device."""

    def __init__(self, own: OwnRows, tokens: PendingTokens, prompts: PendingPrompts | None = None) -> None:
        self.own = own
        self._tokens = tokens
        self._prompts = prompts

    def read(self) -> Sampled:
        """Wait for the tokens, in the order of the micro-batch's segments. Any thread may call it."""
        sampled = self._tokens.read()
        logprobs = {place: _logprobs(token) for place, token in enumerate(sampled) if token.logprob is not None}
        prompts = {} if self._prompts is None else self._prompts.read()
        return Sampled([token.token for token in sampled], logprobs, prompts, max(1, self.own.num_shares))


class PendingPrompts:
    """Log-probabilities of targets being computed on the device. `counts` is the number of targets by chunk index."""

    def __init__(self, logprobs: PendingTokens, counts: dict[int, int]) -> None:
        self._logprobs = logprobs
        self._counts = counts

    def read(self) -> dict[int, list[TokenLogprobs]]:
        """Wait for them, and return them by chunk index. Any thread may call it."""
        found = map(_logprobs, self._logprobs.read())
        return {place: list(islice(found, count)) for place, count in self._counts.items()}


def _logprobs(token: SampledToken) -> TokenLogprobs:
    assert token.logprob is not None
    assert token.rank is not None
    return TokenLogprobs(token.logprob, token.rank, token.top)
