"""One rank's share of a micro-batch: whatever rides along, each segment samples what it samples alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gapless.conf.architecture import Architecture
from gapless.conf.sampling import SamplingParams
from gapless.conf.schema import ModelConfig
from gapless.models.build_stage import build_stage
from gapless.models.stage_spec import StageSpec
from gapless.parallel.groups import Groups
from gapless.parallel.mesh import Mesh
from gapless.parallel.rendezvous import Rendezvous
from gapless.runtime.core.messages import (
    DecodesMessage,
    MicroBatchMessage,
    MicroBatchResult,
    NewRequest,
    Sampled,
    SegmentMessage,
)
from gapless.runtime.pipeline.sampled_shares import SampledShares
from gapless.runtime.pipeline.stage_worker import StageWorker

ARCH = Architecture(
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=64,
    max_position=32,
)


@pytest.fixture(scope="module")
def worker() -> Iterator[StageWorker]:
    with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 60) as groups:
        model = ModelConfig(architecture=ARCH)
        spec = StageSpec(model=model, arch=ARCH, layers=(0, 2), num_blocks=12, block_size=4, seed=3)
        yield StageWorker(build_stage(spec, groups))


def new(request: int, prompt_len: int, **sampling: int) -> NewRequest:
    return NewRequest(request, prompt_len, request, SamplingParams(**sampling), ())


def run(worker: StageWorker, *micro_batches: MicroBatchMessage) -> list[Sampled]:
    worker.restart()
    return [worker.sample(each, worker.forward(worker.prepare(each), None)) for each in micro_batches]


BEGIN = SegmentMessage(0, 0, [5, 6, 7], [0], False)  # of a longer prompt: samples nothing
PLAIN = SegmentMessage(1, 0, [8, 9], [1], True)
PROMPT = SegmentMessage(2, 0, [11, 12, 13, 14, 15], [2, 3], True, [12, 13, 14, 15])
NEW = [new(0, 6), new(1, 2, logprobs=2), new(2, 5, prompt_logprobs=1)]


DRAWN = new(3, 4, temperature=1, seed=5, repetition_penalty=2)


def decode(request: int, start: int, token: int, *blocks: int) -> DecodesMessage:
    return DecodesMessage.of([request], [start], [token], {request: list(blocks)} if blocks else {})


def test_prompts_that_are_scored_beside_others(worker: StageWorker) -> None:
    first = MicroBatchMessage(0, 0, [SegmentMessage(3, 0, [1, 2, 3, 4], [4], True)], DecodesMessage(), [new(3, 4)])
    second = MicroBatchMessage(0, 1, [BEGIN, PLAIN, PROMPT], decode(3, 4, 9, 5), NEW)
    _, together = run(worker, first, second)
    (plain,) = run(worker, MicroBatchMessage(0, 0, [PLAIN], DecodesMessage(), NEW[1:2]))
    (prompt,) = run(worker, MicroBatchMessage(0, 0, [PROMPT], DecodesMessage(), NEW[2:]))
    _, decoded = run(worker, first, MicroBatchMessage(0, 1, [], decode(3, 4, 9, 5)))
    assert together.tokens == [*plain.tokens, *prompt.tokens, *decoded.tokens]
    assert together.logprobs.keys() == plain.logprobs.keys() == {0}
    assert together.logprobs[0].logprob == pytest.approx(plain.logprobs[0].logprob, abs=1e-5)
    assert list(together.prompt_logprobs) == [2]
    assert list(prompt.prompt_logprobs) == [0]
    for found, alone in zip(together.prompt_logprobs[2], prompt.prompt_logprobs[0], strict=True):
        assert found.rank == alone.rank
        assert found.logprob == pytest.approx(alone.logprob, abs=1e-5)
        assert [token for token, _ in found.top] == [token for token, _ in alone.top]


@pytest.mark.parametrize("tp", [2, 3, 4, 9])
def test_ranks_of_a_stage_sample_together_what_one_samples(worker: StageWorker, tp: int) -> None:
    first = MicroBatchMessage(0, 0, [SegmentMessage(3, 0, [1, 2, 3, 4], [4], True)], DecodesMessage(), [DRAWN])
    second = MicroBatchMessage(0, 1, [BEGIN, PLAIN, PROMPT], decode(3, 4, 9, 5), NEW)
    third = MicroBatchMessage(0, 2, [], DecodesMessage.of([1, 2, 3], [2, 5, 5], [3, 3, 3], {2: [6]}))
    none = MicroBatchMessage(0, 3, [SegmentMessage(0, 3, [8], [], False)], DecodesMessage())
    worker.restart()
    shares, expected, logits = SampledShares(), [], []
    for each in (first, second, third, none):
        logits.append(worker.forward(worker.prepare(each), None))
        expected.append(worker.sample(each, logits[-1]))
    found: dict[int, list[MicroBatchResult | None]] = {}
    for rank in range(tp):
        worker.stage.mesh = Mesh(1, tp, rank)
        worker.restart()
        for each, rows in zip((first, second, third, none), logits, strict=True):
            own = worker.stage.mesh.share_of(len(rows))
            sampled = worker.sample(each, rows[own.start : own.stop])
            if own or not rank:
                result = MicroBatchResult(0, each.micro_batch, [], sampled)
                found.setdefault(each.micro_batch, []).append(shares.take(rank, result))
    worker.stage.mesh = Mesh(1, 1)
    for number, alone in enumerate(expected):
        *incomplete, whole = found[number]
        assert incomplete == [None] * (max(1, min(tp, len(logits[number]))) - 1)
        assert whole is not None
        assert whole.sampled == alone
    assert len(found[1]) == min(tp, 7), "each rank has rows of the logits"


def test_rows_of_a_request_s_drafts_bring_its_new_blocks_once() -> None:
    decodes = DecodesMessage.of([4, 4, 4, 7], [9, 10, 11, 3], [1, 2, 3, 4], {4: [8, 9], 7: [5]})
    assert [each.blocks for each in decodes] == [[8, 9], [], [], [5]]
    assert [(each.request, each.start, each.tokens) for each in decodes][1:] == [
        (4, 10, [2]),
        (4, 11, [3]),
        (7, 3, [4]),
    ]
