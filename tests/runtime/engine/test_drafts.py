"""Draft tokens on the real model of the package: outputs are those without them, wherever a run of them ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from gapless import LLM, SamplingParams
from gapless.conf.policies import POLICY_CONFIGS, SarathiConfig
from gapless.runtime.analysis.ledger.fleet import Fleet
from gapless.runtime.analysis.ledger.summary import summarize
from gapless.runtime.engine.outputs import CompletionOutput
from tests.support.tiers import is_whole

LINES = "".join(f"    self.value_{n} = value_{n}\n" for n in range(6))  # goes on as it began
PROMPTS = [f"class Point:\n{LINES}", "import os\nimport sys\nimport", "def read(self, size=-1):\n", LINES]
DRAFTED = SarathiConfig(chunk=64, batch=4, drafts=7)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("shipped", **{"parallel.threads": 1, "scheduler.batch": 4, "cache.num_blocks": 400}) as llm:
        yield llm


def outputs(llm: LLM, policy: Any, params: SamplingParams) -> list[CompletionOutput]:
    llm.reset(policy)
    return [output.outputs[0] for output in llm.generate(PROMPTS, params)]


def counts(llm: LLM) -> tuple[int, int, int]:
    """Count decodes, draft tokens, and those that were accepted."""
    micro_batches = llm.record.micro_batches
    drafts = sum(m.drafts for m in micro_batches)
    return sum(m.decode_tokens for m in micro_batches) - drafts, drafts, sum(m.accepted for m in micro_batches)


@pytest.mark.parametrize("policy", list(POLICY_CONFIGS))
def test_greedy_tokens_are_those_without_drafts(policy: str, llm: LLM) -> None:
    params = SamplingParams(max_tokens=80, ignore_eos=True)
    config = POLICY_CONFIGS[policy](batch=4)
    plain = outputs(llm, config, params)
    without, _, _ = counts(llm)
    assert outputs(llm, replace(config, drafts=7), params) == plain
    decodes, drafts, accepted = counts(llm)
    assert 0 < accepted <= drafts
    assert decodes + accepted == without, "each decode gives its own token and those of its drafts that were right"
    for request in llm.record.requests:
        assert len(request.token_times) == 80
        assert request.token_times == sorted(request.token_times)


def test_a_repetitive_text_gets_more_than_one_draft_accepted_a_decode(llm: LLM) -> None:
    llm.reset(replace(DRAFTED, drafts=8))
    llm.generate(PROMPTS[3], SamplingParams(max_tokens=120, ignore_eos=True))
    decodes, drafts, accepted = counts(llm)
    assert accepted > decodes
    summary = summarize(Fleet([llm.record]))
    assert (summary["draft_tokens"], summary["accepted_tokens"]) == (drafts, accepted)
    assert summary["accepted_tokens_per_decode"] == accepted / decodes > 1
    assert summary["total_output_tokens"] == 120


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_sampled_tokens_and_logprobs_are_those_without_drafts(temperature: float, llm: LLM) -> None:
    params = SamplingParams(max_tokens=60, temperature=temperature, top_p=0.9, seed=5, ignore_eos=True, logprobs=2)
    plain = outputs(llm, SarathiConfig(chunk=64, batch=4), params)
    drafted = outputs(llm, DRAFTED, params)
    assert counts(llm)[2] > 0
    assert [o.token_ids for o in drafted] == [o.token_ids for o in plain]
    for a, b in zip(drafted, plain, strict=True):
        assert a.logprobs is not None
        assert b.logprobs is not None
        assert [list(entries) for entries in a.logprobs] == [list(entries) for entries in b.logprobs]
        assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, abs=1e-3)


def test_an_output_ends_inside_a_run(llm: LLM) -> None:
    """Every length, stop token and stop string that may fall on an accepted draft ends the output there."""
    long = outputs(llm, SarathiConfig(chunk=64, batch=4), SamplingParams(max_tokens=60, ignore_eos=True))
    step = 1 if is_whole() else 6
    for length in range(1, 25, step):
        cut = outputs(llm, DRAFTED, SamplingParams(max_tokens=length, ignore_eos=True))
        assert [o.token_ids for o in cut] == [o.token_ids[:length] for o in long]
        assert {o.finish_reason for o in cut} == {"length"}
    for place in range(20, 32, step):
        token = long[3].token_ids[place]
        params = SamplingParams(max_tokens=60, ignore_eos=True, stop_token_ids=(token,))
        ended = outputs(llm, DRAFTED, params)
        assert ended[3].token_ids == long[3].token_ids[: long[3].token_ids.index(token) + 1]
        assert ended[3].finish_reason == "stop"
        assert ended == outputs(llm, SarathiConfig(chunk=64, batch=4), params)
    accepted = 0
    for stop in ("value_8", "_9 ", "\n    self", "= v"):
        params = SamplingParams(max_tokens=60, ignore_eos=True, stop=(stop,))
        ended = outputs(llm, DRAFTED, params)
        accepted += counts(llm)[2]
        assert ended == outputs(llm, SarathiConfig(chunk=64, batch=4), params)
    assert accepted > 0
    assert llm._coordinator.scheduler.pool.num_used == 0


def test_a_stream_gives_every_token_of_a_run(llm: LLM) -> None:
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    (plain,) = llm.generate(PROMPTS[3], params)
    llm.reset(DRAFTED)
    snapshots = [snapshot.outputs[0] for snapshot in llm.stream(PROMPTS[3], params)]
    assert snapshots[-1].token_ids == plain.outputs[0].token_ids
    assert len(snapshots) < 50, "a run comes at once"
    assert all(after.text.startswith(before.text) for before, after in pairwise(snapshots))


def test_requests_with_penalties_get_no_drafts(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, repetition_penalty=1.01, ignore_eos=True)
    plain = outputs(llm, SarathiConfig(chunk=64, batch=4), params)
    assert outputs(llm, DRAFTED, params) == plain
    assert counts(llm)[1] == 0


def test_a_full_cache_takes_drafts_before_requests(llm: LLM) -> None:
    """Where blocks lack there are fewer drafts; nothing is preempted that would not have been, and outputs stay."""
    params = SamplingParams(max_tokens=80, ignore_eos=True)
    plain = outputs(llm, SarathiConfig(chunk=64, batch=4), params)
    preemptions = []
    for blocks in (12, 15, 17):
        with LLM("shipped", **{"parallel.threads": 1, "scheduler.batch": 4, "cache.num_blocks": blocks}) as tight:
            assert outputs(tight, DRAFTED, params) == plain
            assert counts(tight)[2] > 0
            preemptions.append(sum(r.preemptions for r in tight.record.requests))
            assert tight._coordinator.scheduler.pool.num_used == 0
    assert sum(preemptions) > 0  # in one cache the requests may happen to end by turns
