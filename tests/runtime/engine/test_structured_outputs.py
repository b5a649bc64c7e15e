"""Structured outputs on the real model of the package: they match, alone and in batches, and preempted too."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from gapless import LLM, SamplingParams, StructuredOutputs
from gapless.conf.errors import ConfigError
from gapless.conf.policies import SarathiConfig, TokenBudgetConfig
from gapless.runtime.engine.outputs import CompletionOutput

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PROMPTS = ["import os\n", "class Point:\n    def __init__(self, x):\n", "# a file of JSON:\n", "def main():\n"]
OF_SCHEMA = StructuredOutputs(json=SCHEMA, disable_any_whitespace=True)
OF_REGEX = StructuredOutputs(regex=r"[a-f]{3}-\d{16,20}")
OF_CHOICE = StructuredOutputs(choice=("red", "green\n", 'bl"ü'))
OF_GRAMMAR = StructuredOutputs(grammar='start: "(" start? ")"')
SAMPLED: dict[str, Any] = {"temperature": 1.0, "max_tokens": 30}
PARAMS = [
    SamplingParams(max_tokens=40, structured_outputs=OF_SCHEMA),
    SamplingParams(seed=1, repetition_penalty=1.3, structured_outputs=OF_REGEX, **SAMPLED),
    SamplingParams(seed=2, min_tokens=4, structured_outputs=OF_CHOICE, **SAMPLED),
    SamplingParams(max_tokens=50),
]


def matches(params: SamplingParams, output: CompletionOutput) -> None:
    """Assert that a whole output is of the form that was asked for."""
    wanted, text = params.structured_outputs, output.text
    assert output.finish_reason == ("length" if wanted is None else "stop"), text
    if wanted is OF_SCHEMA:
        jsonschema.validate(json.loads(text), SCHEMA)
    elif wanted is OF_REGEX:
        assert re.fullmatch(OF_REGEX.regex or "", text)
    elif wanted is OF_CHOICE:
        assert text in OF_CHOICE.choice


def tight(**overrides: Any) -> LLM:
    return LLM("shipped", **{"parallel.threads": 1, "scheduler.batch": 4, **overrides})


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with tight() as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[CompletionOutput]:
    """Return what each prompt gives on its own."""
    return [llm.generate(prompt, params)[0].outputs[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


def test_outputs_match_and_end(expected: list[CompletionOutput]) -> None:
    for params, output in zip(PARAMS, expected, strict=True):
        matches(params, output)
    assert len(expected[2].token_ids) >= 4


@pytest.mark.parametrize(
    "policy",
    [
        SarathiConfig(chunk=5, tile=1, batch=4),
        SarathiConfig(chunk=64, batch=4, drafts=7),
        TokenBudgetConfig(batch=4),
    ],
)
def test_outputs_do_not_depend_on_their_batch(policy: Any, llm: LLM, expected: list[CompletionOutput]) -> None:
    llm.reset(policy)
    assert [each.outputs[0] for each in llm.generate(PROMPTS, PARAMS)] == expected


def test_outputs_survive_preemption(expected: list[CompletionOutput]) -> None:
    with tight(**{"cache.num_blocks": 14, "cache.block_size": 4}) as small:
        found = small.generate(PROMPTS, PARAMS)
        assert sum(r.preemptions for r in small.record.requests) > 0
    assert [each.outputs[0] for each in found] == expected


def test_many_draws_all_match(llm: LLM) -> None:
    """Random logits, at a high temperature, would leave a grammar soon; each output is another one."""
    params = SamplingParams(n=20, seed=5, temperature=8.0, max_tokens=200, structured_outputs=OF_SCHEMA)
    (output,) = llm.generate(PROMPTS[0], params)
    for one in output.outputs:
        jsonschema.validate(json.loads(one.text), SCHEMA)
    assert len({one.text for one in output.outputs}) == 20
    params = SamplingParams(n=8, seed=5, temperature=1.0, max_tokens=200, structured_outputs=OF_GRAMMAR)
    for one in llm.generate(PROMPTS[0], params)[0].outputs:
        half = len(one.text) // 2
        assert one.text == "(" * half + ")" * half


def test_bad_words_choose_among_the_outputs_that_match(llm: LLM) -> None:
    drawn = {"temperature": 8.0, "n": 12, "seed": 1}
    choices = StructuredOutputs(choice=["x", "y", "z"])
    (output,) = llm.generate(PROMPTS[0], SamplingParams(bad_words=("x", "z"), structured_outputs=choices, **drawn))
    assert {one.text for one in output.outputs} == {"y"}
    with pytest.raises(ConfigError, match=r"sampling\.bad_words: no output satisfies both this and structured_outputs"):
        llm.generate(PROMPTS[0], SamplingParams(bad_words=("x", "y", "z"), structured_outputs=choices, **drawn))


def test_logprobs_are_those_of_the_allowed_tokens(llm: LLM) -> None:
    params = SamplingParams(logprobs=4, structured_outputs=StructuredOutputs(regex="[xyz]"))
    (output,) = llm.generate(PROMPTS[0], params)
    found = output.outputs[0].logprobs
    assert found is not None
    assert {each.decoded_token for each in found[0].values()} == {"x", "y", "z"}
    assert [each.logprob for each in found[1].values()] == [0.0]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"regex": "[a-"}, r"structured_outputs\.regex: .*unclosed character class"),
        ({"json": {"type": "foo"}}, r"structured_outputs\.json: Invalid type: foo"),
        ({"json": {"type": "array", "uniqueItems": True}}, r"structured_outputs\.json: .*uniqueItems"),
        ({"json": "{"}, r"structured_outputs\.json: not JSON"),
        ({"grammar": "start: missing"}, r"structured_outputs\.grammar: .*missing"),
        ({"grammar": ""}, r"structured_outputs\.grammar: "),
        ({}, "found none"),
        ({"regex": "a", "choice": ["b"]}, "found regex and choice"),
        ({"choice": [""]}, r"choice=\('',\): must be non-empty strings"),
        ({"json_object": 1}, "json_object=1: must be true or false"),
        (
            {"regex": "a", "disable_any_whitespace": True},
            "whitespace options apply to json and json_object, not to regex",
        ),
    ],
)
def test_what_is_wrong_is_one_line(wanted: dict[str, Any], message: str, llm: LLM) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        llm.generate("x", SamplingParams(structured_outputs=StructuredOutputs(**wanted)))
    assert "\n" not in str(error.value)


def test_an_output_without_an_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="ignore_eos"):
        SamplingParams(ignore_eos=True, structured_outputs=OF_REGEX)
