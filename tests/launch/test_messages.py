"""Bodies of `/v1/messages` and `/v1/responses` read, and their answers made, whole and in events, without a server."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gapless.launch.server.endpoints.messages import MessageAnswer
from gapless.launch.server.endpoints.responses import ResponseAnswer
from gapless.launch.server.engine_client import Delta
from gapless.launch.server.errors import ApiError
from gapless.launch.server.messages_input import MessagesBody
from gapless.launch.server.read_body import validated
from gapless.launch.server.requests import ChatBody, ResponseBody
from gapless.launch.server.response_input import response_messages
from gapless.launch.server.tools.dialect import Dialect, Speech
from gapless.launch.server.tools.tool_set import Function, ToolSet
from gapless.models.chat_template import ChatTemplate
from gapless.models.tokenizer import Detokenizer, Tokenizer, load_tokenizer
from gapless.runtime.engine.outputs import CompletionOutput
from tests.support.scripted import write_tokenizer

USER = {"role": "user", "content": "x"}
TOOLS = [{"name": "now", "input_schema": {"type": "object"}}, {"name": "at", "input_schema": {"type": "object"}}]


def body_of(**fields: Any) -> MessagesBody:
    return validated(MessagesBody, {"model": "m", "max_tokens": 9, "messages": [USER], **fields})


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ("auto", "", True)),
        ({"type": "auto"}, ("auto", "", True)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", "", False)),
        ({"type": "any"}, ("required", "", True)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", "", False)),
        ({"type": "tool", "name": "at"}, ("required", "at", True)),
        ({"type": "none"}, None),
    ],
)
def test_a_choice_of_tools_in_openai_s_words(choice: Any, expected: Any) -> None:
    found = body_of(tools=TOOLS, tool_choice=choice).tool_set
    assert (None if found is None else (found.choice, found.named, found.is_parallel)) == expected


@pytest.mark.parametrize(
    ("thinking", "is_shown", "budget"),
    [
        (None, False, None),
        ({"type": "disabled"}, False, None),
        ({"type": "adaptive"}, True, None),
        ({"type": "enabled", "budget_tokens": 1024}, True, 1024),
    ],
)
def test_thinking_is_shown_where_it_is_asked_for(thinking: Any, is_shown: bool, budget: int | None) -> None:
    body = body_of(thinking=thinking)
    assert (body.include_reasoning, body.thinking_token_budget) == (is_shown, budget)
    assert body.further == {"enable_thinking": is_shown}
    own = body_of(thinking=thinking, output_config={"effort": "low"}, chat_template_kwargs={"enable_thinking": 1})
    assert own.further == {"enable_thinking": 1, "reasoning_effort": "low"}


def test_an_answer_that_the_client_began_goes_on() -> None:
    for messages, goes_on in (([USER], False), ([USER, {"role": "assistant", "content": "So"}], True)):
        body = body_of(messages=messages)
        assert (body.continue_final_message, body.add_generation_prompt) == (goes_on, not goes_on)


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"content": [{"type": "reasoning_text", "text": "a"}, {"type": "reasoning_text", "text": "b"}]}, "a\nb"),
        ({"content": None, "summary": [{"type": "summary_text", "text": "c"}]}, "c"),
        ({"summary": [{"type": "summary_text", "text": "c"}]}, "c"),
        ({"content": [{"text": "a"}], "summary": [{"text": "c"}]}, "a"),
        ({"content": [], "summary": []}, None),
    ],
)
def test_reasoning_is_its_content_or_else_its_summary(item: dict[str, Any], text: str | None) -> None:
    answer = {"type": "message", "role": "assistant", "content": "y"}
    call = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"}
    for then in (answer, call):
        first, turn = response_messages([USER, {"type": "reasoning", "id": "r", **item}, then])
        assert first == USER
        assert turn.get("reasoning_content") == text
        assert bool(turn["content"]) == (then is answer)


SEARCHED = [{"type": "web_search_call", "id": "w"}, {"type": "mcp_list_tools", "server_label": "m", "tools": []}]
FUNCTION, RUN = {"type": "function", "function": {"name": "now"}}, {"type": "function", "name": "now"}


def test_nothing_but_what_hosted_tools_wrote_is_no_conversation() -> None:
    block = {"type": "web_search_tool_result", "tool_use_id": "w", "content": []}
    bodies = [validated(ResponseBody, {"input": items, "instructions": "I"}) for items in ([], SEARCHED[:1], SEARCHED)]
    for read in (
        *(partial(getattr, body, "chat") for body in bodies),
        *(partial(getattr, body_of(messages=[USER | {"content": [block]}], system=text), "chat") for text in ("", "S")),
    ):
        with pytest.raises(ApiError, match=r'^(input|messages): must have a message, such as {"role": "user", \.\.\.}'):
            read()


@pytest.mark.parametrize(
    ("kind", "choice", "place"),
    [
        (ResponseBody, {"mode": "auto", "tools": [RUN]}, "tool_choice.type"),
        (ResponseBody, {}, "tool_choice.type"),
        (ResponseBody, {"type": "any"}, "tool_choice.type"),
        (ResponseBody, {"type": "web_search"}, "tool_choice.type"),
        (ResponseBody, FUNCTION, "tool_choice.name"),
        (ResponseBody, {"type": "allowed_tools", "mode": "any", "tools": [RUN]}, "tool_choice.mode"),
        (
            ResponseBody,
            {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "now"}]},
            "tool_choice.tools[0].type",
        ),
        (ResponseBody, {"type": "allowed_tools", "mode": "auto", "tools": [FUNCTION]}, "tool_choice.tools[0].name"),
        (ResponseBody, {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "x"}]}, "tool_choice.type"),
        (ResponseBody, {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, "tool_choice.mode"),
        (ChatBody, {"allowed_tools": {"mode": "auto", "tools": [FUNCTION]}}, "tool_choice.type"),
        (ChatBody, {"name": "now"}, "tool_choice.type"),
        (ChatBody, RUN, "tool_choice.function"),
        (ChatBody, {"type": "allowed_tools", "mode": "auto", "tools": []}, "tool_choice.allowed_tools"),
        (
            ChatBody,
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [RUN]}},
            "tool_choice.allowed_tools.tools[0].function",
        ),
    ],
)
def test_a_choice_that_is_wrong_is_named_by_its_field(kind: Any, choice: Any, place: str) -> None:
    with pytest.raises(ApiError) as wrong:
        _ = validated(kind, OFFERED[kind] | {"tool_choice": choice}).tool_set
    assert (wrong.value.status, wrong.value.param) == (400, place)
    assert wrong.value.message.startswith(f"{place}: ")


OFFERED: dict[Any, Any] = {
    ChatBody: {"messages": [USER], "tools": [FUNCTION]},
    ResponseBody: {"input": "x", "tools": [RUN]},
    MessagesBody: {"messages": [USER], "tools": TOOLS[:1]},
}


@pytest.mark.parametrize("kind", OFFERED)
@pytest.mark.parametrize("other", OFFERED)
def test_a_tool_in_the_words_of_another_path_is_named_by_what_it_lacks(kind: Any, other: Any) -> None:
    if kind is other:
        return
    with pytest.raises(ApiError, match=r"^tools\[0\]\.(type|name|function): ") as wrong:
        validated(kind, OFFERED[kind] | {"tools": OFFERED[other]["tools"]})
    assert wrong.value.message.startswith(f"{wrong.value.param}: ")


def test_a_call_at_the_end_wants_its_result() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "now", "input": {}}
    for before in ([], [{"type": "text", "text": "I look."}]):
        turns = [USER, {"role": "assistant", "content": [*before, call]}]
        with pytest.raises(ApiError, match=r"^messages\[1\]: `tool_use` ids were found without .* after: t1\. [^\n]*$"):
            _ = body_of(messages=turns).chat
        result = {"type": "tool_result", "tool_use_id": "t1", "content": "9"}
        assert len(body_of(messages=[*turns, {"role": "user", "content": [result]}]).chat) == 3
    searched = [
        USER,
        {"role": "assistant", "content": [{"type": "server_tool_use", "id": "s", "name": "w", "input": {}}]},
    ]
    body = body_of(messages=searched)  # of which nothing is left that could be continued
    assert (body.chat, body.continue_final_message, body.add_generation_prompt) == ([USER], False, True)


def test_reasoning_after_text_or_calls_begins_a_turn() -> None:
    def reasoning(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "content": [{"text": text}]}

    answer = {"type": "message", "role": "assistant", "content": "y"}
    call = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"}
    for before in (answer, call):
        found = response_messages([reasoning("a"), before, reasoning("b"), answer])
        assert [each.get("reasoning_content") for each in found] == ["a", "b"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, ["<|end|>", "<think>", "</think>"])
    return load_tokenizer(folder, 300)


def speech_of(tokenizer: Tokenizer) -> Speech:
    dialect = Dialect(ChatTemplate("{{ tools }}<tool_call><think></think>", {}), tokenizer)
    speech = dialect.speech("prompt", ToolSet([Function("now"), Function("at")]))
    assert speech is not None
    return speech


def whole(answer: Any, tokenizer: Tokenizer, text: str, cached: int = 0, **ended: Any) -> Any:
    ids = tokenizer.encode(text, False)
    output = CompletionOutput(0, text, ids, **({"finish_reason": "stop"} | ended), cached_tokens=cached)
    return json.loads(answer.whole([output], {}))


def events(answer: Any, tokenizer: Tokenizer, text: str, cached: int = 0, **ended: Any) -> list[Any]:
    """Return the events of an output that comes token by token."""
    ids = tokenizer.encode(text, False)
    detokenizer = Detokenizer(tokenizer, shown=[token for token in ids if tokenizer.is_silent(token)])
    stream = b"".join(answer.first_chunks())
    for place, token in enumerate(ids):
        is_last = place == len(ids) - 1
        end: dict[str, Any] = {"finish_reason": None, "stop_reason": None}
        end |= ({"finish_reason": "stop"} | ended) if is_last else {}
        piece = detokenizer.push(token) + (detokenizer.flush() if is_last else "")
        stream += answer.chunk(Delta(0, piece, token, None, **end, cached_tokens=cached if place == 0 else 0))
    stream += b"".join(answer.last_chunks())
    return [json.loads(line[6:]) for line in stream.decode().split("\n") if line.startswith("data: ")]


CALL = '<tool_call>\n{"name": "now", "arguments": %s}\n</tool_call>'
SAID = "<think>Hm.</think>\n\nI look.\n" + CALL % '{"a": 1}' + "\n" + CALL % "[1, 2]"


def test_a_message_s_blocks_and_usage_are_the_same_whole_and_in_events(tokenizer: Tokenizer) -> None:
    made = [MessageAnswer("m", [[1] * 20], body_of(), tokenizer, speech_of(tokenizer)) for _ in range(2)]
    made[1].id = made[0].id
    message = whole(made[0], tokenizer, SAID, cached=16)
    kinds = [block["type"] for block in message["content"]]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert [block["input"] for block in message["content"][2:]] == [{"a": 1}, {"INVALID_JSON": "[1, 2]"}]
    assert message["usage"] == {
        "input_tokens": 4,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 16,
        "output_tokens": len(tokenizer.encode(SAID, False)),
    }
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    found = events(made[1], tokenizer, SAID, cached=16)
    assert [event["index"] for event in found if event["type"] == "content_block_start"] == [0, 1, 2, 3]
    assert [event["index"] for event in found if event["type"] == "content_block_stop"] == [0, 1, 2, 3]
    open_: list[int] = []
    for event in found:  # each delta is of the block that is open
        if event["type"] == "content_block_start":
            assert not open_
            open_.append(event["index"])
        elif event["type"] == "content_block_delta":
            assert open_ == [event["index"]]
        elif event["type"] == "content_block_stop":
            assert open_.pop() == event["index"]
    *_, end, stop = found
    assert (end["delta"], end["usage"]) == ({"stop_reason": "tool_use", "stop_sequence": None}, message["usage"])
    assert stop == {"type": "message_stop"}
    ids = [block["id"] for block in message["content"][2:]]
    streamed = [
        each["content_block"]["id"] for each in found if each.get("content_block", {}).get("type") == "tool_use"
    ]
    assert ids == streamed
    assert len(set(ids)) == 2


@pytest.mark.parametrize(
    ("ended", "reason", "sequence"),
    [
        ({"finish_reason": "stop", "stop_reason": None}, "end_turn", None),
        ({"finish_reason": "stop", "stop_reason": 7}, "end_turn", None),
        ({"finish_reason": "stop", "stop_reason": "look"}, "stop_sequence", "look"),
        ({"finish_reason": "length", "stop_reason": None}, "max_tokens", None),
    ],
)
def test_why_a_message_stopped(ended: dict[str, Any], reason: str, sequence: str | None, tokenizer: Tokenizer) -> None:
    message = whole(MessageAnswer("m", [[1]], body_of(), tokenizer), tokenizer, "I", **ended)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    *_, end, _ = events(MessageAnswer("m", [[1]], body_of(), tokenizer), tokenizer, "I", **ended)
    assert end["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


def test_a_response_s_items_and_usage_are_the_same_whole_and_in_events(tokenizer: Tokenizer) -> None:
    body = validated(ResponseBody, {"model": "m", "input": "x"})
    made = [ResponseAnswer("m", [[1] * 20], body, tokenizer, speech_of(tokenizer), asked={}) for _ in range(2)]
    made[1].id = made[0].id
    response = whole(made[0], tokenizer, SAID, cached=16)
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert len({item["id"] for item in response["output"]}) == 4
    assert len({item["call_id"] for item in response["output"][2:]}) == 2
    tokens, reasoning = len(tokenizer.encode(SAID, False)), response["usage"]["output_tokens_details"]
    assert 3 <= reasoning["reasoning_tokens"] <= 5  # those of `Hm.`, and perhaps the marks around it
    assert response["usage"] == {
        "input_tokens": 20,
        "input_tokens_details": {"cached_tokens": 16},
        "output_tokens": tokens,
        "output_tokens_details": reasoning,
        "total_tokens": 20 + tokens,
    }
    found = events(made[1], tokenizer, SAID, cached=16)
    end = next(event for event in found if event["type"] == "response.completed")["response"]
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    assert end["output"] == response["output"]
    assert end["usage"] == response["usage"]
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert done == response["output"]
