"""Rows of prompts: values as requests have them, and requests of OpenAI's batch files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gapless.conf.errors import ConfigError
from gapless.conf.sampling import SamplingParams
from gapless.conf.schema import GenerateConfig, ModelConfig
from gapless.conf.structured_outputs import StructuredOutputs
from gapless.launch.prompts import Prompt, StandardInput, read_prompts

USER = {"role": "user", "content": "x"}


def prompt_of(row: Any, folder: Path) -> Prompt:
    """Return the prompt of a file with one row."""
    (folder / "rows.jsonl").write_text(json.dumps(row))
    config = GenerateConfig(model=ModelConfig(weights="shipped"), prompts=str(folder / "rows.jsonl"))
    (found,) = read_prompts(config, StandardInput())
    return found


PLAIN: dict[str, tuple[Any, Any]] = {  # values of a row, and what they stand for
    **{name: (None, getattr(SamplingParams(), name)) for name in ("temperature", "max_tokens", "stop", "n", "top_p")},
    **{f"{name} ": (4.0, 4) for name in ("max_tokens", "top_k", "seed", "min_tokens")},
    **{f"{name}  ": (-1, None if name == "seed" else 0) for name in ("seed", "top_k")},
    **{"stop_token_ids": ([3.0], (3,)), "stop ": ("x", ("x",)), "n ": (2.0, 2), "logit_bias": ({"5": 1}, {5: 1})},
}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("url", [None, "/v1/completions", "/v1/chat/completions"])
def test_values_of_rows_are_read_as_those_of_requests(name: str, url: str | None, tmp_path: Path) -> None:
    given, read = PLAIN[name]
    name = name.strip()
    content: dict[str, Any] = {"prompt": "x"} if url != "/v1/chat/completions" else {"messages": [USER]}
    row = {**content, name: given}
    row = row if url is None else {"custom_id": "a", "url": url, "body": {"model": "any", **row}}
    found = prompt_of(row, tmp_path)
    defaults = {each: getattr(SamplingParams(), each) for each in ("temperature", "max_tokens")}
    assert {each: getattr(found.params, each) for each in (*defaults, name)} == {**defaults, name: read}
    assert found.custom_id == (None if url is None else "a")


@pytest.mark.parametrize(
    ("fields", "read"),
    [
        ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": False, "store": False, "tools": [], "parallel_tool_calls": True}, {"logprobs": None}),
        ({"guided_choice": ["a"]}, {"structured_outputs": StructuredOutputs(choice=("a",))}),
        ({"response_format": {"type": "json_object"}}, {"structured_outputs": StructuredOutputs(json_object=True)}),
        ({"max_completion_tokens": 3.0, "max_tokens": None, "service_tier": "auto", "stream": True}, {"max_tokens": 3}),
    ],
)
def test_the_body_of_a_batch_s_request_is_read_as_the_server_does(
    fields: Any, read: dict[str, Any], tmp_path: Path
) -> None:
    row = {"url": "/v1/chat/completions", "body": {"messages": [USER], **fields}}
    found = prompt_of(row, tmp_path)
    assert {name: getattr(found.params, name) for name in read} == read


@pytest.mark.parametrize("prompt", ["x", ["x"], [1.0, 2], [[1, 2]]])
def test_the_one_prompt_of_a_batch_s_completion(prompt: Any, tmp_path: Path) -> None:
    found = prompt_of({"url": "/v1/completions", "body": {"prompt": prompt, "echo": False}}, tmp_path)
    assert found.content == ("x" if "x" in prompt else [1, 2])


def test_a_batch_s_request_is_refused_in_the_servers_words(tmp_path: Path) -> None:
    row = {"url": "/v1/chat/completions", "body": {"messages": [USER], "top_logprobs": 3}}
    with pytest.raises(ConfigError, match="top_logprobs: requires logprobs=true"):
        prompt_of(row, tmp_path)
