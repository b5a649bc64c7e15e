"""One process that is a micro-batch ahead gives what it gives without, over a real model in a tight KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

from gapless import LLM, SamplingParams
from gapless.conf.build import compose_engine
from gapless.conf.policies import POLICY_CONFIGS, SchedulerConfig
from gapless.conf.schema import EngineConfig
from gapless.conf.structured_outputs import StructuredOutputs
from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.engine import start
from gapless.runtime.engine.outputs import CompletionOutput, RequestOutput
from gapless.runtime.engine.plan import make_plan
from gapless.runtime.pipeline.local import LocalPipeline

POLICIES = {name: config(batch=5) for name, config in POLICY_CONFIGS.items()}
ALIKE = "class Queue:\n    def put(self, item):\n        "
PROMPTS = ["def read(self, size=-1):\n", ALIKE, "import os\n", f"{ALIKE}if", "Return a list of", "for i in range("] * 2
DRAWN = {"temperature": 0.9, "seed": 7}
PARAMS = [
    SamplingParams(max_tokens=40, ignore_eos=True),
    SamplingParams(max_tokens=30, stop=("self", "return")),
    SamplingParams(max_tokens=30, **DRAWN, stop_token_ids=tuple(range(0, 512, 9)), min_tokens=3),
    SamplingParams(max_tokens=20, **DRAWN, presence_penalty=0.5, ignore_eos=True),
    SamplingParams(max_tokens=20, **DRAWN, structured_outputs=StructuredOutputs(regex="[a-z]{3,9}")),
    SamplingParams(max_tokens=1),
    SamplingParams(max_tokens=25, **DRAWN, top_k=20, n=2, logprobs=2),
    SamplingParams(max_tokens=35, prompt_logprobs=1, ignore_eos=True),
    SamplingParams(max_tokens=30, bad_words=("self",)),
    SamplingParams(max_tokens=2),
    SamplingParams(max_tokens=30, **DRAWN, stop=("\n",)),
    SamplingParams(max_tokens=40, logprobs=0, ignore_eos=True),
]


def config_of(**overrides: object) -> EngineConfig:
    return compose_engine(
        model="shipped", pp=1, tp=1, scheduler="sarathi", launcher=None, hardware="cpu", overrides=overrides
    )


@pytest.mark.parametrize(("depth", "may"), [(None, True), (1, False)])
def test_a_depth_that_is_given_is_kept_to(monkeypatch: pytest.MonkeyPatch, depth: int | None, may: bool) -> None:
    made: list[bool] = []
    monkeypatch.setattr(start, "LocalPipeline", lambda setup, device, looks_ahead: made.append(looks_ahead))
    config = config_of(**{"parallel.depth": depth})
    start.start_pipeline(config, make_plan(config), None, lambda text: None)
    assert made == [may]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    overrides = {
        "parallel.threads": 1,
        "cache.num_blocks": 24,
        "cache.block_size": 4,
        "scheduler.chunk": 8,
        "scheduler.tile": 1,
    }
    with LLM.from_config(config_of(**overrides), policies=list(POLICIES.values())) as llm:
        yield llm


def generate(llm: LLM, policy: SchedulerConfig, looks_ahead: bool) -> list[RequestOutput]:
    """Generate with work queued by `submit`, as on CUDA, where it looks ahead."""
    pipeline = llm._core.pipeline
    assert isinstance(pipeline, LocalPipeline)
    pipeline._is_cuda = pipeline.looks_ahead = looks_ahead
    llm.reset(policy)
    return llm.generate(PROMPTS, PARAMS)


def _facts(output: CompletionOutput) -> tuple[object, ...]:
    return output.token_ids, output.text, output.finish_reason, [sorted(each) for each in output.logprobs or []]


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[RequestOutput]:
    return generate(llm, POLICIES["sarathi"], False)


@pytest.mark.parametrize("policy", POLICIES)
def test_outputs_are_the_same(llm: LLM, expected: list[RequestOutput], policy: str) -> None:
    found = generate(llm, POLICIES[policy], True)
    for output, plain in zip(found, expected, strict=True):
        assert [_facts(each) for each in output.outputs] == [_facts(each) for each in plain.outputs]
    record = llm.record
    ahead = [b.dispatched < a.completed for a, b in pairwise(record.micro_batches) if a.completed is not None]
    assert sum(ahead) > len(ahead) / 2
    Ledger(record).check()
    for stage, lane in enumerate(Ledger(record).lanes):
        assert (lane.begin[1:] >= lane.end[:-1]).all(), stage
    scheduler = llm._core.coordinator.scheduler
    while llm._core.coordinator.has_work:
        llm._core.coordinator.step(0.0)
    assert scheduler.pool.num_free == scheduler.pool.num_blocks
    if policy == "sarathi":
        assert scheduler.pool.cache is not None
        assert scheduler.pool.cache.hits > 0
        assert sum(request.preemptions for request in record.requests) > 0
