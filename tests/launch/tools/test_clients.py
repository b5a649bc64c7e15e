"""Clients of others call tools: openai, anthropic, langchain, litellm. The engine is real, the model has a script."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from tests.support.scripted import scripted_model
from tests.support.server import Server, serving
from tests.support.tool_outputs import OUTPUTS, TOOLS

RAW = {each.id: each for each in OUTPUTS}
HERMES, REASONS = RAW["hermes"], RAW["hermes reasons"]
SCRIPTS = {
    "two0": HERMES.raw,
    "two2": "It rains in Paris.",
    "think0": REASONS.raw,
    "think0n": "No thought at all.",
    "think1": "<think>3 days, then.</think>\n\nTake an umbrella!",
    "json0": "I think that\n</think>\n\n{\"a\": 12}",
    "text0": "<tool_call>\n{\"name\": \"fs.patch\", \"arguments\": {\"input\": \"+ \\\"é\\\"\\n- b\"}}\n</tool_call>",
    "loud0": "I say <tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": 5}}\n</tool_call>",
}  # fmt: skip
CHAT_TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}
    for name, schema in TOOLS.items()
]
LIMITS = ("parallel.threads=1", "cache.num_blocks=300")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serve")
    scripted_model(folder / "model", SCRIPTS, "<tool_call> </think>", ("<think>", "</think>"))
    with serving(folder, "model=./model", *LIMITS) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


def reasoning_tokens(answer: Any) -> int:
    found: int = answer.usage.completion_tokens_details.reasoning_tokens
    return found


def streamed(client: openai.OpenAI, **asked: Any) -> dict[str, Any]:
    """Put a stream together as clients do."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": None}
    for chunk in client.chat.completions.create(model="model", stream=True, **asked):
        (choice,) = chunk.choices
        found["content"] += choice.delta.content or ""
        found["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or ():
            if call.id:
                assert call.index == len(found["calls"])
                found["calls"].append({"id": call.id, "name": call.function.name, "arguments": ""})
            found["calls"][call.index]["arguments"] += call.function.arguments
        found["finish"] = choice.finish_reason or found["finish"]
    return found


def test_calls_and_their_results(client: openai.OpenAI) -> None:
    messages = user("two")
    answer = client.chat.completions.create(model="model", messages=messages, tools=CHAT_TOOLS)
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", HERMES.text)
    assert calls_of(choice.message) == HERMES.calls
    found = streamed(client, messages=messages, tools=CHAT_TOOLS)
    assert (found["finish"], found["content"]) == ("tool_calls", HERMES.text)
    assert [(call["name"], json.loads(call["arguments"])) for call in found["calls"]] == HERMES.calls
    calls = choice.message.tool_calls or []
    assert len({call.id for call in calls}) == 2
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in calls]
    messages += [choice.message.to_dict(), *results]
    again = client.chat.completions.create(model="model", messages=messages, tools=CHAT_TOOLS)
    assert (again.choices[0].message.content, again.choices[0].finish_reason) == ("It rains in Paris.", "stop")


def test_reasoning_beside_calls(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"messages": user("think"), "tools": CHAT_TOOLS}
    answer = client.chat.completions.create(model="model", **asked)
    message = answer.choices[0].message
    assert getattr(message, "reasoning_content", None) == REASONS.reasoning
    assert calls_of(message) == REASONS.calls
    assert message.content is None
    assert 0 < reasoning_tokens(answer) < answer.usage.completion_tokens
    found = streamed(client, **asked)
    assert (found["reasoning"], found["content"]) == (REASONS.reasoning, "")
    assert [(call["name"], json.loads(call["arguments"])) for call in found["calls"]] == REASONS.calls
    for extra in ({"include_reasoning": False}, {"chat_template_kwargs": {"enable_thinking": False}}):
        for stream in (False, True):
            if stream:
                assert streamed(client, **asked, extra_body=extra)["reasoning"] == ""
            else:
                plain = client.chat.completions.create(model="model", **asked, extra_body=extra)
                assert getattr(plain.choices[0].message, "reasoning_content", None) is None
    off = client.chat.completions.create(model="model", messages=user("think"), reasoning_effort="none")
    assert off.choices[0].message.content is not None


def test_tokens_of_reasoning_are_counted_alike_in_a_stream(client: openai.OpenAI) -> None:
    counts = []
    for most in (400, 12):
        asked: dict[str, Any] = {"model": "model", "messages": user("think"), "max_tokens": most}
        counts.append(reasoning_tokens(client.chat.completions.create(**asked)))
        *_, last = client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked)
        assert reasoning_tokens(last) == counts[-1]
    assert counts[0] > counts[1] == 12


def test_a_form_of_the_output_is_that_of_what_follows_the_reasoning(client: openai.OpenAI) -> None:
    """The prompt ends within the reasoning, which the form would forbid."""
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]}
    form = {"json": schema | {"additionalProperties": False}, "disable_any_whitespace": True}
    message = (
        client.chat.completions.create(
            model="model", messages=user("json"), extra_body={"structured_outputs": form}, temperature=0, max_tokens=60
        )
        .choices[0]
        .message
    )
    assert message.to_dict()["reasoning_content"] == "I think that", message
    assert re.match(r"{\"a\":-?\d", message.content or ""), message


def test_a_budget_of_reasoning_ends_it(client: openai.OpenAI) -> None:
    for stream in (False, True):
        body = {"thinking_token_budget": 3}
        if stream:
            found = streamed(client, messages=user("think"), extra_body=body, max_tokens=40)
            reasoning = found["reasoning"]
        else:
            answer = client.chat.completions.create(
                model="model", messages=user("think"), extra_body=body, max_tokens=40
            )
            reasoning = getattr(answer.choices[0].message, "reasoning_content", "")
            assert reasoning_tokens(answer) == 3
        assert 0 < len(reasoning) < len(REASONS.reasoning)
        assert REASONS.reasoning.startswith(reasoning.rstrip())


def test_forced_and_strict_calls_follow_their_schemas(client: openai.OpenAI) -> None:
    """The script's own call has a number for a city, which a schema forbids."""
    asked: dict[str, Any] = {"model": "model", "messages": user("loud"), "max_tokens": 300, "seed": 3}
    free = client.chat.completions.create(tools=CHAT_TOOLS, **asked).choices[0].message
    assert calls_of(free) == [("get_weather", {"city": 5})]
    strict = [{"type": "function", "function": each["function"] | {"strict": True}} for each in CHAT_TOOLS]
    name = {"type": "function", "function": {"name": "now"}}
    for further in (
        {"tools": strict},
        {"tools": CHAT_TOOLS, "tool_choice": "required"},
        {"tools": CHAT_TOOLS, "tool_choice": name},
    ):
        choice = client.chat.completions.create(
            **asked, **further, parallel_tool_calls=False, extra_body={"logit_bias": {}}
        ).choices[0]
        assert choice.message.tool_calls, choice
        assert choice.message.content == (None if "tool_choice" in further else "I say")
        call = choice.message.tool_calls[0]
        if choice.finish_reason == "length":  # texts of a random model need not end
            assert call.function.arguments.startswith('{"city": "') or call.function.name == "now"
        else:
            assert set(json.loads(call.function.arguments)) <= set(TOOLS[call.function.name]["properties"])
        assert further.get("tool_choice") != name or call.function.name == "now"


@pytest.fixture(scope="module")
def claude(server: Server) -> Any:
    anthropic = pytest.importorskip("anthropic")
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


MESSAGE_TOOLS: list[Any] = [
    {"name": name, "description": "d", "input_schema": schema} for name, schema in TOOLS.items()
]


def test_anthropic_calls_and_their_results(claude: Any) -> None:
    asked: dict[str, Any] = {"model": "model", "max_tokens": 300, "tools": MESSAGE_TOOLS, "system": "Be kind."}
    messages = user("two")
    answer = claude.messages.create(messages=messages, **asked)
    assert answer.stop_reason == "tool_use"
    assert [block.type for block in answer.content] == ["text", "tool_use", "tool_use"]
    assert answer.content[0].text == HERMES.text
    assert [(block.name, block.input) for block in answer.content[1:]] == HERMES.calls
    with claude.messages.stream(messages=messages, **asked) as stream:
        kinds = [event.type for event in stream]
        whole = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert [block.to_dict() | {"id": ""} for block in whole.content] == [
        block.to_dict() | {"id": ""} for block in answer.content
    ]
    assert whole.stop_reason == "tool_use"
    assert whole.usage.output_tokens == answer.usage.output_tokens
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "rain"}]}
        for block in answer.content[1:]
    ]
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    again = claude.messages.create(messages=messages, **asked)
    assert [block.text for block in again.content] == ["It rains in Paris."]
    assert again.stop_reason == "end_turn"
    counted = claude.messages.count_tokens(model="model", messages=messages, tools=MESSAGE_TOOLS, system="Be kind.")
    assert counted.input_tokens == again.usage.input_tokens + again.usage.cache_read_input_tokens
    with claude.messages.stream(messages=messages, stop_sequences=["ains"], **asked) as stream:
        stopped = stream.get_final_message()
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "ains")
    assert stopped.content[0].text == "It r"


def test_anthropic_thinking(claude: Any) -> None:
    asked: dict[str, Any] = {"model": "model", "max_tokens": 2000, "tools": MESSAGE_TOOLS}
    thinking = {"type": "enabled", "budget_tokens": 1024}
    answer = claude.messages.create(messages=user("think"), thinking=thinking, **asked)
    assert [block.type for block in answer.content] == ["thinking", "tool_use"]
    assert answer.content[0].thinking == REASONS.reasoning
    with claude.messages.stream(messages=user("think"), thinking=thinking, **asked) as stream:
        whole = stream.get_final_message()
    assert whole.content[0].thinking == REASONS.reasoning
    result = {"type": "tool_result", "tool_use_id": answer.content[1].id, "content": "sun"}
    messages = [*user("think"), {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    again = claude.messages.create(messages=messages, thinking=thinking, **asked)
    assert [block.type for block in again.content] == ["thinking", "text"]
    assert again.content[1].text == "Take an umbrella!"
    off = claude.messages.create(messages=user("think"), **asked)
    assert [block.to_dict() for block in off.content] == [{"type": "text", "text": "No thought at all."}]


def test_anthropic_errors(claude: Any) -> None:
    import anthropic

    for further in (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
        {"messages": user("x"), "tools": [{"type": "bash_20250124", "name": "bash"}], "tool_choice": {"type": "any"}},
        {"messages": user("x"), "tool_choice": {"type": "tool", "name": "none"}, "tools": MESSAGE_TOOLS},
        {"messages": [{"role": "system", "content": [{"type": "thinking", "thinking": "x"}]}]},
    ):
        with pytest.raises(anthropic.BadRequestError) as wrong:
            claude.messages.create(model="model", max_tokens=5, **further)
        assert wrong.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", max_tokens=5, messages=user("x"))


RESPONSE_TOOLS: list[Any] = [
    {"type": "function", "name": name, "description": "d", "parameters": schema} for name, schema in TOOLS.items()
]


def test_responses_with_calls_and_their_results(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "model", "tools": RESPONSE_TOOLS, "store": False}
    items: list[Any] = user("two")
    answer = client.responses.create(input=items, **asked)
    assert [item.type for item in answer.output] == ["message", "function_call", "function_call"]
    assert answer.output_text == HERMES.text
    calls: list[Any] = answer.output[1:]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == HERMES.calls
    with client.responses.stream(input=items, **asked) as stream:
        kinds = [event.type for event in stream]
        whole = stream.get_final_response()
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.function_call_arguments.done") == 2
    assert [each.type for each in whole.output] == [each.type for each in answer.output]
    assert [(call.name, json.loads(call.arguments)) for call in whole.output[1:]] == HERMES.calls
    items += [item.to_dict() for item in answer.output]
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in calls]
    assert client.responses.create(input=items, **asked).output_text == "It rains in Paris."


def test_responses_with_reasoning(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "model", "tools": RESPONSE_TOOLS}
    items: list[Any] = user("think")
    answer = client.responses.create(input=items, **asked)
    assert [item.type for item in answer.output] == ["reasoning", "function_call"]
    assert answer.output[0].content[0].text == REASONS.reasoning
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    events = list(client.responses.create(input=items, stream=True, **asked))
    assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == REASONS.reasoning
    assert [event.sequence_number for event in events] == list(range(len(events)))
    items += [item.to_dict() for item in answer.output]
    items.append({"type": "function_call_output", "call_id": answer.output[1].call_id, "output": "sun"})
    again = client.responses.create(input=items, **asked)
    assert again.output_text == "Take an umbrella!"
    off = client.responses.create(input=user("think"), reasoning={"effort": "none"}, **asked)
    assert [item.type for item in off.output] == ["message"]


def langchain_said(model: Any, messages: list[Any], stream: bool) -> Any:
    if not stream:
        return model.invoke(messages)
    answer, *pieces = model.stream(messages)
    for piece in pieces:
        answer += piece
    return answer


def test_a_tool_that_takes_a_text_in_a_namespace(client: openai.OpenAI) -> None:
    tools: list[Any] = [
        {"type": "namespace", "name": "fs", "description": "d", "tools": [{"type": "custom", "name": "patch"}]}
    ]
    asked: dict[str, Any] = {"model": "model", "tools": tools, "input": user("text")}
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    kinds = [event.type for event in events if "custom" in event.type]
    assert kinds == ["response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"]
    for answer in (streamed, client.responses.create(**asked)):
        (call,) = answer.output
        assert call.type == "custom_tool_call"
        assert (call.namespace, call.name, call.input) == ("fs", "patch", '+ "é"\n- b')


@pytest.mark.parametrize("path", ["chat", "responses"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_langchain(server: Server, path: str, stream: bool) -> None:
    """Two turns of results, without reasoning and with it, which its client reads from whole responses only."""
    import langchain_core.messages as parts
    import langchain_openai

    model = langchain_openai.ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="none", model="model", max_retries=0, use_responses_api=path == "responses"
    )
    tools = model.bind_tools(CHAT_TOOLS)
    for name, said, last in (("two", HERMES, "It rains in Paris."), ("think", REASONS, "Take an umbrella!")):
        messages: list[Any] = [parts.HumanMessage(name)]
        answer = langchain_said(tools, messages, stream)
        assert [(call["name"], call["args"]) for call in answer.tool_calls] == said.calls
        if path == "responses" and not stream:
            texts = [each["text"] for block in answer.content for each in block.get("content", ())]
            assert "".join(texts) == said.reasoning
        messages += [answer, *(parts.ToolMessage("rain", tool_call_id=call["id"]) for call in answer.tool_calls)]
        assert langchain_said(tools, messages, stream).text == last


@pytest.mark.parametrize("path", ["openai", "anthropic"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_litellm(server: Server, path: str, stream: bool) -> None:
    """Two turns of results, without reasoning and with it."""
    litellm = pytest.importorskip("litellm", reason="not installed: with what it wants, it is 350 MB")
    where = {"openai": f"{server.url}/v1", "anthropic": server.url}[path]
    asked = {"model": f"{path}/model", "api_base": where, "api_key": "none", "tools": CHAT_TOOLS, "max_tokens": 2000}

    def said(messages: list[Any], **further: Any) -> Any:
        answer = litellm.completion(messages=messages, stream=stream, **asked, **further)
        return (litellm.stream_chunk_builder(list(answer), messages=messages) if stream else answer).choices[0]

    thinking: dict[str, Any] = {}
    if path == "anthropic":  # LiteLLM knows which models think
        thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "allowed_openai_params": ["thinking"]}
    for name, script, last in (("two", HERMES, "It rains in Paris."), ("think", REASONS, "Take an umbrella!")):
        further = thinking if name == "think" else {}
        choice = said(user(name), **further)
        assert choice.finish_reason == "tool_calls"
        assert calls_of(choice.message) == script.calls
        assert (getattr(choice.message, "reasoning_content", None) or "") == script.reasoning
        results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in choice.message.tool_calls]
        again = said([*user(name), choice.message.model_dump(), *results], **further)
        assert again.message.content == last


def agents_schema(**properties: Any) -> dict[str, Any]:
    schema = "http://json-schema.org/draft-07/schema#"
    return {"$schema": schema, "type": "object", "properties": properties, "required": [*properties][:1]}


def test_a_conversation_as_coding_agents_send_it_to_messages(server: Server) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    command = agents_schema(command={"type": "string"}, timeout={"type": "number", "description": "in ms"})
    body = {
        "model": "model",
        "max_tokens": 1000,
        "temperature": 1,
        "stream": True,
        "metadata": {"user_id": "user_1_session_2"},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "system": [{"type": "text", "text": "You are an agent.", **cached}, {"type": "text", "text": "Be brief."}],
        "tools": [
            {"name": "Bash", "description": "Runs a command.", "input_schema": command},
            {"name": "get_weather", "description": "d", "input_schema": TOOLS["get_weather"], **cached},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "two"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "List first.", "signature": "x"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
                    {"type": "tool_use", "id": "toolu_2", "name": "Bash", "input": {"command": "cat a"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a\nb", "is_error": False},
                    {"type": "tool_result", "tool_use_id": "toolu_2", "content": [{"type": "text", "text": "no"}]},
                    {"type": "text", "text": "<system-reminder>Go on.</system-reminder>", **cached},
                ],
            },
        ],
    }
    headers = {"x-api-key": "none", "anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}
    answer = httpx2.post(f"{server.url}/v1/messages?beta=true", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert "x-ignored-fields" not in answer.headers
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data:")]
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    assert text == "It rains in Paris."


def test_a_conversation_as_coding_agents_send_it_to_responses(server: Server) -> None:
    command = agents_schema(command={"type": "array", "items": {"type": "string"}}, workdir={"type": "string"})
    said = [{"type": "input_text", "text": "<environment_context>x</environment_context>"}]
    body = {
        "model": "model",
        "instructions": "You are an agent.",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "two"}]},
            {"type": "message", "role": "developer", "content": said},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": None},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "name": "shell", "arguments": '{"command":["ls"]}', "call_id": "call_1"},
            {"type": "function_call_output", "call_id": "call_1", "output": "a"},
            {"type": "function_call", "name": "shell", "arguments": '{"command":["cat","a"]}', "call_id": "call_2"},
            {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "no"}]},
        ],
        "tools": [{"type": "function", "name": "shell", "description": "d", "strict": False, "parameters": command}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "x",
        "text": {"verbosity": "low"},
    }
    answer = httpx2.post(f"{server.url}/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    last = json.loads(answer.text.split("event: response.completed\ndata: ")[1].split("\n")[0])["response"]
    assert last["output"][0]["content"][0]["text"] == "It rains in Paris."
