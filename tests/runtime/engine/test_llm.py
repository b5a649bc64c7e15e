"""The Python API on one rank, with the model that the package ships."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gapless import LLM, SamplingParams
from gapless.conf.policies import OrcaBestConfig, RequestLevelConfig, SarathiConfig
from gapless.runtime.analysis.ledger.ledger import Ledger
from tests.support import hf_models

PROMPT = "def read(self, size=-1):\n"
PROMPTS = [PROMPT, "import os\n", "class Queue:\n    def put(self, item):\n        ", "Return a list of"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    overrides = {"parallel.threads": 1, "scheduler.chunk": 16, "cache.num_blocks": 400, "scheduler.batch": 4}
    with LLM("shipped", **overrides) as llm:
        yield llm


@pytest.fixture(scope="module")
def greedy(llm: LLM) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, SamplingParams(max_tokens=24))]


def test_prompts_may_be_text_or_ids_one_or_many(llm: LLM, greedy: list[list[int]]) -> None:
    params = SamplingParams(max_tokens=24)
    ids = [llm.tokenizer.encode(p) for p in PROMPTS]
    for prompts in (PROMPTS, ids, [PROMPTS[0], *ids[1:]]):
        outputs = llm.generate(prompts, params)
        assert [o.outputs[0].token_ids for o in outputs] == greedy
        assert [o.prompt_token_ids for o in outputs] == ids
        assert [o.index for o in outputs] == [0, 1, 2, 3]
    for one in (PROMPTS[2], ids[2], {"prompt": PROMPTS[2]}, {"prompt": None, "prompt_token_ids": ids[2]}):
        (output,) = llm.generate(one, sampling_params=params)
        assert output.outputs[0].token_ids == greedy[2]
    several = llm.generate([{"prompt": PROMPTS[0]}, ids[1], {"prompt": "not this", "prompt_token_ids": ids[2]}], params)
    assert [o.outputs[0].token_ids for o in several] == greedy[:3]
    assert llm.generate([], params) == []


def test_bad_words(llm: LLM, greedy: list[list[int]]) -> None:
    """A word does not come, at its start or after a space, however many tokens it has; others stay as they were."""
    words = [llm.tokenizer.decode(ids).split()[1] for ids in greedy]
    banned = [SamplingParams(max_tokens=24, bad_words=(word,)) for word in words]
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]
    outputs = llm.generate(prompts, [each for own in banned for each in (own, replace(own, bad_words=()))])
    assert [o.outputs[0].token_ids for o in outputs[1::2]] == greedy
    for word, plain, output in zip(words, greedy, outputs[::2], strict=True):
        text, ids = output.outputs[0].text, output.outputs[0].token_ids
        assert f" {word}" in llm.tokenizer.decode(plain)
        assert ids != plain
        for form in (llm.tokenizer.encode(word), llm.tokenizer.encode(f" {word}")):
            assert not any(ids[i : i + len(form)] == form for i in range(len(ids))), text
    (sequence,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=24, bad_words_ids=(tuple(greedy[0][5:8]),)))
    assert sequence.outputs[0].token_ids[:7] == greedy[0][:7]
    assert sequence.outputs[0].token_ids[7] != greedy[0][7]


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"bad_words": ("",)}, "sampling.bad_words=('',): must be at most 1024 non-blank words"),
        ({"bad_words": "\ud800"}, "sampling.bad_words: contains a lone surrogate, which is not text"),
        ({"bad_words_ids": ((1, -2),)}, "sampling.bad_words_ids=[-2]: must lie in 0 .. "),
        ({"bad_words_ids": ((),)}, "sampling.bad_words_ids=((),): must be lists of token ids"),
        ({"bad_words_ids": (3,)}, "sampling.bad_words_ids=(3,): must be lists of token ids"),
    ],
)
def test_bad_words_that_are_none(llm: LLM, given: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=re.escape(line)):
        llm.generate("x", SamplingParams(**given))


def test_one_params_or_one_each(llm: LLM, greedy: list[list[int]]) -> None:
    each = [SamplingParams(max_tokens=n) for n in (1, 5, 9, 24)]
    outputs = llm.generate(PROMPTS, each)
    assert [o.outputs[0].token_ids for o in outputs] == [
        ids[: p.max_tokens] for ids, p in zip(greedy, each, strict=True)
    ]
    assert {o.outputs[0].finish_reason for o in outputs[:3]} == {"length"}
    with pytest.raises(ValueError, match="4 prompts, but 3 sampling params"):
        llm.generate(PROMPTS, each[:3])
    with pytest.raises(ValueError, match="must be SamplingParams"):
        llm.generate(PROMPTS[0], {"max_tokens": 4})  # type: ignore[arg-type]


def test_text_is_the_decoded_tokens(llm: LLM) -> None:
    for output in llm.generate(PROMPTS, SamplingParams(max_tokens=24)):
        completion = output.outputs[0]
        assert completion.text == llm.tokenizer.decode(completion.token_ids)


def test_a_stream_grows_to_what_generate_gives(llm: LLM, greedy: list[list[int]]) -> None:
    texts: dict[int, list[str]] = {}
    last = {}
    for output in llm.stream(PROMPTS, SamplingParams(max_tokens=24)):
        texts.setdefault(output.index, []).append(output.outputs[0].text)
        last[output.index] = output
    assert [last[i].outputs[0].token_ids for i in range(4)] == greedy
    assert all(o.finished for o in last.values())
    assert all(b.startswith(a) for each in texts.values() for a, b in itertools.pairwise(each))
    assert len(texts[0]) == len(greedy[0])


def test_a_snapshot_stays_as_it_was(llm: LLM) -> None:
    snapshots = list(llm.stream(PROMPT, SamplingParams(max_tokens=6, logprobs=1)))
    assert [len(s.outputs[0].token_ids) for s in snapshots] == [1, 2, 3, 4, 5, 6]
    assert [len(s.outputs[0].logprobs or []) for s in snapshots] == [1, 2, 3, 4, 5, 6]


def test_a_stream_that_is_left_early_aborts(llm: LLM, greedy: list[list[int]]) -> None:
    llm.reset()
    stream = llm.stream(PROMPTS, SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    stream.close()
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=24))
    assert [o.outputs[0].token_ids for o in outputs] == greedy
    reasons = [r.finish_reason for r in llm.record.requests]
    assert reasons[:4] == ["abort"] * 4
    Ledger(llm.record).check()


def test_streams_may_take_turns(llm: LLM, greedy: list[list[int]]) -> None:
    params = SamplingParams(max_tokens=24)
    first, second = llm.stream(PROMPTS[:2], params), llm.stream(PROMPTS[2:], params)
    seen = {0: [next(first)], 1: [next(second)]}
    assert llm.generate(PROMPTS[0], params)[0].outputs[0].token_ids == greedy[0]
    seen[0] += first
    seen[1] += second
    for number, outputs in seen.items():
        last = {o.index: o for o in outputs}
        assert [last[i].outputs[0].token_ids for i in range(2)] == greedy[2 * number :][:2]
        assert all(o.finished for o in last.values())
    for one, other in itertools.pairwise(seen.values()):
        assert not {o.request_id for o in one} & {o.request_id for o in other}


def test_a_stream_that_is_never_begun_aborts(llm: LLM, greedy: list[list[int]]) -> None:
    for leave in (lambda stream: stream.close(), lambda stream: None):
        leave(llm.stream(PROMPTS, SamplingParams(max_tokens=24)))
        llm.reset()
    assert llm.generate(PROMPTS[0], SamplingParams(max_tokens=24))[0].outputs[0].token_ids == greedy[0]


def test_token_ids_may_be_integers_of_any_kind(llm: LLM, greedy: list[list[int]]) -> None:
    ids = llm.tokenizer.encode(PROMPTS[0])
    params = SamplingParams(max_tokens=24)
    for prompts in (np.array(ids), torch.tensor(ids), tuple(ids), np.array([ids])):
        (output,) = llm.generate(prompts, params)
        assert output.prompt_token_ids == ids
        assert {type(token) for token in output.prompt_token_ids} == {int}
        assert output.outputs[0].token_ids == greedy[0]


@pytest.mark.parametrize("policy", [SarathiConfig(chunk=5, tile=1, batch=2), OrcaBestConfig(), RequestLevelConfig()])
def test_a_seed_fixes_the_output_whatever_runs_beside_it(llm: LLM, policy: object) -> None:
    seeded = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, seed=11)
    llm.reset(SarathiConfig(chunk=16, batch=4))
    (alone,) = llm.generate(PROMPT, seeded)
    llm.reset(policy)
    others = SamplingParams(max_tokens=40, temperature=1.0)
    crowd = llm.generate([*PROMPTS, PROMPT, *PROMPTS], [*[others] * 4, seeded, *[others] * 4])
    assert crowd[4].outputs[0].token_ids == alone.outputs[0].token_ids
    assert crowd[0].outputs[0].token_ids != crowd[5].outputs[0].token_ids, "unseeded requests differ"
    llm.reset(SarathiConfig(chunk=16, batch=4))


def test_n_gives_different_samples_and_is_repeatable(llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=16, temperature=1.0, seed=5)
    first, again = (llm.generate(PROMPT, params)[0] for _ in range(2))
    ids = [tuple(o.token_ids) for o in first.outputs]
    assert len(set(ids)) == 3
    assert [o.index for o in first.outputs] == [0, 1, 2]
    assert [tuple(o.token_ids) for o in again.outputs] == ids


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPT, SamplingParams(max_tokens=24))
    text = whole.outputs[0].text
    stop = text[6:9]
    (cut,) = llm.generate(PROMPT, SamplingParams(max_tokens=24, stop=stop))
    out = cut.outputs[0]
    assert out.text == text[: text.index(stop)]
    assert (out.finish_reason, out.stop_reason) == ("stop", stop)
    assert out.token_ids == whole.outputs[0].token_ids[: len(out.token_ids)]
    kept = llm.generate(PROMPT, SamplingParams(max_tokens=24, stop=stop, include_stop_str_in_output=True))
    assert kept[0].outputs[0].text == text[: text.index(stop)] + stop


def test_a_stop_token_ends_without_its_text(llm: LLM, greedy: list[list[int]]) -> None:
    token = greedy[0][4]
    at = greedy[0].index(token)
    (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=24, stop_token_ids=(token,)))
    out = output.outputs[0]
    assert (out.finish_reason, out.stop_reason) == ("stop", token)
    assert out.token_ids == greedy[0][: at + 1]
    assert out.text == llm.tokenizer.decode(greedy[0][:at])
    later = SamplingParams(max_tokens=24, stop_token_ids=(token,), min_tokens=at + 2)
    assert len(llm.generate(PROMPT, later)[0].outputs[0].token_ids) >= at + 2


def test_eos_ends_unless_ignored(llm: LLM) -> None:
    (eos,) = llm.plan.arch.eos_token_ids
    prompt = [*llm.tokenizer.encode(PROMPT), eos]
    ends = [SamplingParams(max_tokens=300, temperature=1.0, seed=s) for s in range(6)]
    finished = [o.outputs[0] for o in llm.generate([prompt] * 6, ends)]
    stopped = [o for o in finished if o.finish_reason == "stop"]
    assert all(o.token_ids[-1] == eos and "<|" not in o.text for o in stopped)
    goes_on = SamplingParams(max_tokens=40, ignore_eos=True)
    assert len(llm.generate(prompt, goes_on)[0].outputs[0].token_ids) == 40


def test_logprobs_are_those_of_the_model(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=6, logprobs=3))
    out = output.outputs[0]
    assert out.logprobs is not None
    assert len(out.logprobs) == 6
    for token, entries in zip(out.token_ids, out.logprobs, strict=True):
        assert len(entries) == 3
        assert entries[token].rank == 1, "greedy takes the most likely"
        assert sorted(e.rank for e in entries.values()) == [1, 2, 3]
        assert sum(math.exp(e.logprob) for e in entries.values()) <= 1.0
    total = sum(e[t].logprob for t, e in zip(out.token_ids, out.logprobs, strict=True))
    assert out.cumulative_logprob == pytest.approx(total)
    (none,) = llm.generate(PROMPT, SamplingParams(max_tokens=2))
    assert none.outputs[0].logprobs is None


def test_penalties_survive_preemption(llm: LLM) -> None:
    params = SamplingParams(max_tokens=60, repetition_penalty=1.3, frequency_penalty=0.5, ignore_eos=True)
    llm.reset(SarathiConfig(chunk=16, batch=4))
    expected = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]
    with LLM("shipped", **{"parallel.threads": 1, "scheduler.batch": 4, "cache.num_blocks": 12}) as tight:
        assert [o.outputs[0].token_ids for o in tight.generate(PROMPTS, params)] == expected
        assert sum(r.preemptions for r in tight.record.requests) > 0


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt 0 is empty"),
        ([], "prompt 0 is empty"),
        ([5, 10**6], "prompt 0 contains a token id outside 0"),
        ([-1], "prompt 0 contains a token id outside 0"),
        ([1.5], "prompt 0 is neither a text nor a list of token ids"),
        ([None], "prompt 0 is neither a text nor a list of token ids"),
        ({"prompt": 5}, "prompt 0 is neither a text nor a list of token ids"),
        ({}, r"prompt 0 is a mapping with \[\]: must have prompt or prompt_token_ids alone"),
        ({"promt": "x"}, r"prompt 0 is a mapping with \['promt'\]: must"),
        (
            {"prompt": "x", "multi_modal_data": {"image": "y"}},
            r"prompt 0 is a mapping with \['multi_modal_data'\]: must",
        ),
        (None, "prompt 0 is neither a text nor a list of token ids"),
        ([1] * 2048, "prompt 0 has 2048 tokens: the context is 2048"),
    ],
)
def test_a_bad_prompt_is_refused_and_none_is_run(llm: LLM, prompt: object, message: str) -> None:
    llm.reset()
    with pytest.raises(ValueError, match=message):
        llm.generate([prompt], SamplingParams(max_tokens=4))
    assert not llm.record.requests


def test_a_prompt_that_can_never_fit_the_cache_is_refused() -> None:
    with (
        LLM("shipped", **{"cache.num_blocks": 4, "parallel.threads": 1}) as llm,
        pytest.raises(ValueError, match=r"may reach 69 tokens: cache\.num_blocks=4 of 16 hold 64"),
    ):
        llm.generate([[5] * 5], SamplingParams(max_tokens=64))


def test_the_context_ends_a_request(llm: LLM) -> None:
    (output,) = llm.generate([[7] * 2040], SamplingParams(max_tokens=100, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 8
    assert output.outputs[0].finish_reason == "length"


def test_a_closed_llm_says_so() -> None:
    llm = LLM("tiny", **{"parallel.threads": 1})
    llm.close()
    llm.close()
    with pytest.raises(ValueError, match="closed"):
        llm.generate("x")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"scheduler.chnk": 4}, r"scheduler\.chnk: unknown key; did you mean 'scheduler\.chunk'"),
        ({"scheduler": "sarathy"}, "did you mean 'sarathi'"),
        ({"model": "lama-7b"}, "lama-7b"),
        ({"pp": 2, "launcher": "local"}, r"parallel\.launcher='local'"),
        ({"launcher": "slurm"}, "slurm"),
        ({"tp": 3}, r"parallel\.tp=3: must divide"),
        ({"pp": 50}, r"parallel\.pp=50: must be at most"),
        ({"hardware.memory_gib": 0.001}, r"hardware\.memory_gib=0\.001"),
        ({"cache.num_blocks": 10**7, "scheduler.batch": 10**6}, r"or lower cache\.num_blocks"),
        pytest.param(
            {"hardware": "a100-80g"},
            "hardware=a100-80g: torch finds no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU"),
        ),
    ],
)
def test_a_wrong_choice_is_one_line_before_anything_starts(overrides: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        LLM(**({"model": "shipped"} | overrides))
    assert "\n" not in str(caught.value)


def test_a_request_without_finite_logits_ends_alone(tmp_path: Path) -> None:
    """One token's embedding is NaN: prompts that hold it end with an error, also late ones; the others go on."""
    broken = 7
    model = hf_models.make_model("llama", tmp_path)
    with torch.no_grad():
        model.get_input_embeddings().weight[broken] = torch.nan
    model.save_pretrained(tmp_path)
    good = [[1, 2, 3, 4, 5] * (1 + n) for n in range(4)]
    prompts = [good[0], [broken, 1, 2], good[1], [9] * 20 + [broken], good[2], good[3]]
    params = SamplingParams(max_tokens=8, logprobs=2)
    overrides = {"parallel.threads": 1, "model.tokenizer": "none", "scheduler.chunk": 8, "cache.num_blocks": 60}
    with LLM(str(tmp_path), **overrides) as llm:
        outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
        again = llm.generate(good, params)
    assert [output.finish_reason for output in outputs] == ["length", "error", "length", "error", "length", "length"]
    assert [output.token_ids for output in (outputs[1], outputs[3])] == [[], []]
    expected = [hf_models.greedy(model, prompt, 8) for prompt in good]
    assert [outputs[index].token_ids for index in (0, 2, 4, 5)] == expected
    assert [output.outputs[0].token_ids for output in again] == expected  # blocks that held NaN are used again
