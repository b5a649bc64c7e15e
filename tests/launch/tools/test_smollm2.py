"""SmolLM2, whose chat template knows no tools, calls them: forced by a grammar, with results and in all three APIs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from gapless.conf.errors import ConfigError
from gapless.models.gguf.smollm2 import smollm2
from tests.support.server import Server, serving

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"name": "get_weather", "description": "The weather of a city.", "parameters": SCHEMA}
ASKED = "What is the weather in Paris, in celsius?"


def is_there() -> bool:
    try:
        return bool(smollm2())
    except ConfigError:
        return False


pytestmark = [pytest.mark.slow, pytest.mark.skipif(not is_there(), reason="SmolLM2 is not installed")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # A prompt is computed whole each time: after reused blocks its logits round otherwise, which decides a tie.
    with serving(tmp_path_factory.mktemp("serve"), "model=smollm2", "cache.prefix_caching=false") as started:
        yield started


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_chats(server: Server, stream: bool) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    asked: dict[str, Any] = {"model": "smollm2", "temperature": 0, "tools": [{"type": "function", "function": TOOL}]}
    further: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 120}
    if stream:
        with client.chat.completions.stream(messages=messages, **asked, **further) as events:
            for _ in events:
                pass
            message = events.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(messages=messages, **asked, **further).choices[0].message
    (call,) = message.tool_calls or ()
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    jsonschema.validate(arguments, SCHEMA)
    assert "Paris" in arguments["city"]
    assert not message.content
    result = {"role": "tool", "tool_call_id": call.id, "content": "It rains, 9 degrees."}
    called = {"role": "assistant", "content": None, "tool_calls": [call.to_dict()]}
    again = client.chat.completions.create(messages=[*messages, called, result], **asked, max_tokens=40)
    assert again.choices[0].message.content or again.choices[0].message.tool_calls
    none = client.chat.completions.create(messages=messages, **asked, tool_choice="none", max_tokens=20)
    assert none.choices[0].message.content
    assert not none.choices[0].message.tool_calls


def test_messages(server: Server) -> None:
    anthropic = pytest.importorskip("anthropic")
    claude = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    tool = {"name": TOOL["name"], "description": TOOL["description"], "input_schema": SCHEMA}
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    asked: dict[str, Any] = {"model": "smollm2", "tools": [tool], "max_tokens": 120, "extra_body": {"temperature": 0}}
    with claude.messages.stream(
        messages=messages, tool_choice={"type": "any", "disable_parallel_tool_use": True}, **asked
    ) as stream:
        answer = stream.get_final_message()
    (block,) = answer.content
    jsonschema.validate(block.input, SCHEMA)
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "It rains, 9 degrees."}
    turns = [*messages, {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
    assert claude.messages.create(messages=turns, **asked).content
    assert claude.messages.count_tokens(model="smollm2", messages=turns, tools=[tool]).input_tokens > 100


def test_responses(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": "smollm2", "temperature": 0, "tools": [{"type": "function", **TOOL}]}
    name = {"type": "function", "name": "get_weather"}
    with client.responses.stream(input=ASKED, tool_choice=name, parallel_tool_calls=False, **asked) as stream:
        for _ in stream:
            pass
        answer = stream.get_final_response()
    (call,) = answer.output
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    items: list[Any] = [{"role": "user", "content": ASKED}, call.model_dump(exclude={"parsed_arguments"})]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "It rains, 9 degrees."})
    assert client.responses.create(input=items, max_output_tokens=40, **asked).output


def test_a_text_is_as_without_tools(server: Server) -> None:
    """A form of the output is kept beside no tools, and unread outputs are what they were."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "Say hello."}]
    asked: dict[str, Any] = {"model": "smollm2", "temperature": 0, "max_tokens": 20, "messages": messages}
    plain = client.chat.completions.create(**asked).choices[0].message
    unused = (
        client.chat.completions.create(**asked, tools=[{"type": "function", "function": TOOL}], tool_choice="none")
        .choices[0]
        .message
    )
    assert unused.content == plain.content
