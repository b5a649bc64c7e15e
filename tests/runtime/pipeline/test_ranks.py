"""Real ranks give the tokens of one rank alone, and go on after faults. They are forks, so that they start at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gapless import LLM
from gapless.conf.sampling import SamplingParams
from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.engine.outputs import RequestOutput
from tests.support.process_launcher import ProcessLauncher

PROMPTS = [[1, 2, 3], [4, 5, 6, 7] * 30, [9] * 40, [11, 12]]
PARAMS = [
    SamplingParams(max_tokens=60, ignore_eos=True),
    SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.9, seed=7, logprobs=2),
    SamplingParams(max_tokens=50, ignore_eos=True, temperature=0.7, repetition_penalty=1.2, seed=8),
    SamplingParams(max_tokens=60, ignore_eos=True, presence_penalty=0.5),
]
LIMITS = {"parallel.threads": 1, "scheduler.chunk": 64}


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LLM("tiny", **LIMITS) as llm:
        return tokens_of(llm.generate(PROMPTS, PARAMS))


@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_give_the_tokens_of_one(pp: int, tp: int, expected: list[list[int]]) -> None:
    with LLM("tiny", pp=pp, tp=tp, launcher=ProcessLauncher(), **LIMITS) as llm:
        assert tokens_of(llm.generate(PROMPTS, PARAMS)) == expected
        prompts = [replace(params, prompt_logprobs=1) for params in PARAMS]
        assert tokens_of(llm.generate(PROMPTS, prompts)) == expected, "also where their rows are many"
        ledger = Ledger(llm.record)
        ledger.check()
        for span in llm.record.spans:
            assert span.ready <= span.input <= span.begin <= span.end <= span.sent


def test_ranks_that_end_change_no_token(expected: list[list[int]]) -> None:
    launcher = ProcessLauncher()
    with LLM("tiny", pp=2, launcher=launcher, **LIMITS) as llm:
        ends = [1, 0]
        found: list[list[int]] = [[] for _ in PROMPTS]
        for number, output in enumerate(llm.stream(PROMPTS, PARAMS)):
            tokens, known = output.outputs[0].token_ids, found[output.index]
            assert tokens[: len(known)] == known, "a token that was sent has changed"
            found[output.index] = tokens
            if number % 40 == 39 and ends:
                launcher.ranks[ends.pop(0)].kill()
        assert found == expected
        record = llm.record
        assert [(fault.epoch, fault.reason, fault.ranks) for fault in record.faults] == [
            (1, "process", [1]),
            (2, "process", [0]),
        ]
        for fault in record.faults:
            assert fault.up is not None
            assert fault.since <= fault.detected <= fault.up
            assert sum(fault.parts.values()) == pytest.approx(fault.up - fault.detected, abs=1e-6)
        Ledger(record).check()
        assert tokens_of(llm.generate(PROMPTS, PARAMS)) == expected, "nothing of the faults is left"
