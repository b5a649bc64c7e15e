"""What may stand beside tools in a request: a form of the answer, tools that the server does not have, other names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.support.scripted import scripted_model
from tests.support.server import Server, serving

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
SCRIPTS = {"call0": CALL, "answer0": '{"k":"a"}', "think0": "<think>Which?</think>\n\n" + '{"k": "b"}',
           "think0n": '{ "k": "b"}', "text0": "I say no."}  # fmt: skip
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}}, "required": ["city"],
        "additionalProperties": False}  # fmt: skip
FORM = {"type": "object", "properties": {"k": {"enum": ["a", "b"]}}, "required": ["k"], "additionalProperties": False}
CHAT, RESPONSE, MESSAGE = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PATHS = (CHAT, RESPONSE, MESSAGE)
FUNCTIONS: dict[str, Any] = {
    CHAT: {"type": "function", "function": {"name": "get_weather", "parameters": CITY}},
    RESPONSE: {"type": "function", "name": "get_weather", "parameters": CITY},
    MESSAGE: {"name": "get_weather", "input_schema": CITY},
}
FORMS: dict[str, dict[str, Any]] = {
    CHAT: {"response_format": {"type": "json_schema", "json_schema": {"name": "r", "schema": FORM}}},
    RESPONSE: {"text": {"format": {"type": "json_schema", "name": "r", "schema": FORM}}},
    MESSAGE: {"output_config": {"format": {"type": "json_schema", "schema": FORM}}},
}
of_each_path = pytest.mark.parametrize("path", PATHS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serve")
    scripted_model(folder / "model", SCRIPTS, "<tool_call> </think>", ("<think>", "</think>"))
    names = "serve.model_name=[mine,other,'*']"
    with serving(folder, "model=./model", names, "parallel.threads=1", "cache.num_blocks=300") as started:
        yield started


def asked(server: Server, path: str, script: str, tools: list[Any] | None = None, **fields: Any) -> httpx2.Response:
    body: dict[str, Any] = {"temperature": 0, "tools": [FUNCTIONS[path]] if tools is None else tools, **fields}
    if path == RESPONSE:
        body |= {"input": script, "max_output_tokens": 200}
    else:
        body |= {"messages": [{"role": "user", "content": script}], "max_tokens": 200}
    return httpx2.post(server.url + path, json=body, timeout=60)


def read(path: str, answer: Any) -> tuple[str, list[tuple[str, Any]]]:
    """Return the text of an answer, and its calls."""
    if path == CHAT:
        message = answer["choices"][0]["message"]
        calls = [call["function"] for call in message.get("tool_calls", ())]
        return message["content"] or "", [(call["name"], json.loads(call["arguments"])) for call in calls]
    items = answer["output" if path == RESPONSE else "content"]
    calls = [(item["name"], json.loads(item["arguments"])) for item in items if item["type"] == "function_call"]
    calls += [(item["name"], item["input"]) for item in items if item["type"] == "tool_use"]
    parts = [part for item in items for part in ([item, *item.get("content", ())] if path == RESPONSE else [item])]
    return "".join(part["text"] for part in parts if part["type"] in ("text", "output_text")), calls


def kind_of(path: str, response: httpx2.Response) -> str:
    """Check an answer, and return whether it is calls or fits the form.

    Where a grammar forces a text, the model may take it only as the tokenizer cuts it, and leaves its script.
    """
    text, calls = read(path, response.json())
    for name, arguments in calls:
        assert (name, arguments["city"] in ("Rome", "Paris")) == ("get_weather", True)
    if calls:
        assert text == ""
        return "call"
    assert json.loads(text)["k"] in ("a", "b")
    return "answer"


@of_each_path
def test_a_call_or_an_answer_of_the_form(server: Server, path: str) -> None:
    form = FORMS[path]
    for script, kind in (("call", "call"), ("answer", "answer"), ("think", "answer")):
        assert kind_of(path, asked(server, path, script, **form)) == kind
    assert kind_of(path, asked(server, path, "text", **form)) in ("call", "answer")
    forced: Any = {"type": "any"} if path == MESSAGE else "required"
    none: Any = {"type": "none"} if path == MESSAGE else "none"
    for script in ("call", "answer"):
        assert kind_of(path, asked(server, path, script, tool_choice=forced, **form)) == "call"
        assert kind_of(path, asked(server, path, script, tool_choice=none, **form)) == "answer"


@of_each_path
def test_the_form_alone(server: Server, path: str) -> None:
    form = FORMS[path]
    older = [{"output_format": form["output_config"]["format"]}] if path == MESSAGE else []
    for each in (form, *older):
        assert kind_of(path, asked(server, path, "text", [], **each)) == "answer"


def test_several_streams_of_calls_or_answers(server: Server) -> None:
    for script, place in (("call", 1), ("think", 0)):
        found = [["", ""], ["", ""]]
        lines = asked(server, CHAT, script, n=2, stream=True, **FORMS[CHAT]).text.splitlines()
        for line in lines:
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    delta, of_one = choice["delta"], found[choice["index"]]
                    of_one[0] += delta.get("content") or ""
                    of_one[1] += "".join(call["function"]["arguments"] for call in delta.get("tool_calls", ()))
        for of_one in found:
            assert json.loads(of_one[place])
            assert of_one[1 - place] == ""


@pytest.mark.parametrize("form", [{"json": FORM}, {"choice": ["yes"]}, {"regex": "ye?s"}, {"grammar": 'start: "yes"'}])
def test_vllms_forms_beside_tools(server: Server, form: dict[str, Any]) -> None:
    assert kind_of(CHAT, asked(server, CHAT, "call", structured_outputs=form)) == "call"


def test_a_form_that_does_not_compile_is_named(server: Server) -> None:
    wrong = {"type": "json_schema", "json_schema": {"schema": {"type": "nonesuch"}}}
    answer = asked(server, CHAT, "call", response_format=wrong)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")
    answer = asked(server, CHAT, "call", structured_outputs={"regex": "("})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "structured_outputs")


HOSTED = {
    CHAT: ["web_search", "custom", "retrieval"],
    RESPONSE: ["web_search", "web_search_preview", "file_search", "code_interpreter", "computer_use_preview", "mcp",
               "image_generation", "local_shell", "tool_search", "new_one"],
    MESSAGE: ["web_search_20250305", "bash_20250124", "text_editor_20250728", "computer_20250124",
              "code_execution_20250522", "memory_20250818", "web_fetch_20250910", "mcp_toolset"],
}  # fmt: skip


@of_each_path
def test_tools_that_are_not_here(server: Server, path: str) -> None:
    hosted = [{"type": kind, "name": kind.partition("_2")[0], "max_uses": 2.0} for kind in HOSTED[path]]
    for choice in ({}, {"tool_choice": {"type": "auto"} if path == MESSAGE else "auto"}):
        answer = asked(server, path, "call", [*hosted, FUNCTIONS[path]], **choice)
        assert kind_of(path, answer) == "call"
        assert answer.headers["x-ignored-tools"].split(", ") == HOSTED[path]
    assert asked(server, path, "answer", hosted).status_code == 200
    forced: list[Any] = ["required", {"type": hosted[0]["type"]}]
    if path == MESSAGE:
        forced = [{"type": "any"}, {"type": "tool", "name": hosted[0]["name"]}]
    for choice in forced:
        for tools in (hosted, [*hosted, FUNCTIONS[path]]):
            answer = asked(server, path, "call", tools, tool_choice=choice)
            assert answer.status_code == 400
            assert f"no {hosted[0]['type']} tool" in answer.json()["error"]["message"]
            assert "WebSearch" in answer.json()["error"]["message"]
    assert server.log.count(f"{path}: ignoring tool of type {hosted[0]['type']},") == 1


def test_items_of_tools_that_are_not_here(server: Server) -> None:
    items = [{"type": "web_search_call", "id": "ws_1", "status": "completed"}, {"role": "user", "content": "call"}]
    answer = httpx2.post(server.url + RESPONSE, json={"input": items, "tools": [FUNCTIONS[RESPONSE]]})
    assert (kind_of(RESPONSE, answer), answer.headers["x-ignored-tools"]) == ("call", "web_search_call")
    blocks = [{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}, {"type": "text", "text": "x"}]
    turns = [{"role": "user", "content": "call"}, {"role": "assistant", "content": blocks}]
    body = {"messages": [*turns, {"role": "user", "content": "so"}], "max_tokens": 30}
    answer = httpx2.post(server.url + MESSAGE, json=body)
    assert (answer.status_code, answer.headers["x-ignored-tools"]) == (200, "server_tool_use")


@pytest.mark.parametrize("path", [CHAT, RESPONSE])
def test_some_tools_are_allowed(server: Server, path: str) -> None:
    def choice(mode: str, *tools: Any) -> dict[str, Any]:
        some = {"mode": mode, "tools": list(tools)}
        return {"type": "allowed_tools", **(some if path == RESPONSE else {"allowed_tools": some})}

    other = json.loads(json.dumps(FUNCTIONS[path]).replace("get_weather", "now"))
    (other if path == RESPONSE else other["function"])["strict"] = True
    named = {"type": "function", **({"name": "now"} if path == RESPONSE else {"function": {"name": "now"}})}
    tools = [FUNCTIONS[path], other, {"type": "web_search"}]
    for mode in ("auto", "required"):
        called = read(path, asked(server, path, "call", tools, tool_choice=choice(mode, named)).json())[1]
        assert {name for name, _ in called} == {"now"}
    search = {"type": "web_search"}
    assert read(path, asked(server, path, "answer", tools, tool_choice=choice("auto", search)).json())[1] == []
    assert asked(server, path, "call", tools, tool_choice=choice("required", search)).status_code == 400
    unknown = json.loads(json.dumps(named).replace("now", "nonesuch"))
    assert asked(server, path, "call", tools, tool_choice=choice("auto", unknown)).status_code == 400


@of_each_path
def test_null_absent_and_floats_in_tools(server: Server, path: str) -> None:
    """Each optional key of a tool may be null; a number without a fraction is an integer, in a schema too."""
    schema = {**CITY, "properties": {"city": {"enum": ["Rome"]}, "to": {"maxLength": 4.0}}, "minProperties": 1.0}
    own = {"name": "get_weather", "description": None, "strict": None}
    own |= {"input_schema" if path == MESSAGE else "parameters": schema}
    tool = {"type": "function", "function": own} if path == CHAT else own | {"type": None, "cache_control": None}
    tool = own | {"type": "function"} if path == RESPONSE else tool
    forced: Any = {"type": "any", "disable_parallel_tool_use": None, "name": None} if path == MESSAGE else "required"
    answer = asked(server, path, "call", [tool], tool_choice=forced)
    assert answer.status_code == 200, answer.text
    assert kind_of(path, answer) == "call"
    no_schema = {**own, "parameters": None}
    if path != MESSAGE:
        tool = {"type": "function", "function": no_schema} if path == CHAT else no_schema | {"type": "function"}
        assert asked(server, path, "call", [tool], tool_choice=None, parallel_tool_calls=None).status_code == 200


def test_names(server: Server) -> None:
    listed = httpx2.get(f"{server.url}/v1/models").json()["data"]
    assert [(card["id"], card["root"]) for card in listed] == [("mine", "mine"), ("other", "mine")]
    for name in ("mine", "other", "claude-sonnet-9"):
        assert asked(server, MESSAGE, "answer", model=name).json()["model"] == "mine"
        assert httpx2.get(f"{server.url}/v1/models/{name}").json()["id"] == name
    assert 'model_name="mine"' in httpx2.get(f"{server.url}/metrics").text
