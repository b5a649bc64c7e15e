"""Conversations of coding agents, replayed: each turn of the model in a recording is what the server must answer.

A recording is the last request of a conversation, in the shape that the agent sends it, after the sources of Codex CLI,
opencode, OpenHands, Cline, aider and LiteLLM and the published types of Anthropic and OpenAI. The texts are ours. The
requests before are its beginnings. The model has the recorded turns as its script, in the format of Hermes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.scripted import scripted_model
from tests.support.server import Server, serving

FILES = sorted((Path(__file__).parent / "recorded").glob("*.json"))
RECORDINGS = {path.stem: json.loads(path.read_text()) for path in FILES}
TEMPLATE = """\
{#- MARKS -#}
{%- set known = namespace(ids=[], turns=0) -%}
{{- (tools or []) | tojson | length }}
{%- for message in messages %}<|{{ message.role }}|>{{ message | tojson | length }}
{%- if message.content is defined and message.content is not string %}{{ raise_exception('no text') }}{% endif %}
{%- for call in message.tool_calls or [] %}
{%- if call.function.arguments is not mapping %}{{ raise_exception('no object') }}{% endif %}
{%- set known.ids = known.ids + [call.id] %}{% endfor %}
{%- if message.role == 'tool' and message.tool_call_id not in known.ids %}{{ raise_exception('no call') }}{% endif %}
{%- if message.role == 'assistant' %}{% set known.turns = known.turns + 1 %}{% endif %}
{%- endfor %}
{{- '<|' ~ (NAMES | select('in', messages[0].content) | first) ~ known.turns ~ '|>' }}"""


@dataclass
class Turn:
    """What the model says in one turn. Arguments of calls are objects, or texts where the tool takes one."""

    reasoning: str = ""
    text: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list, compare=False)

    @property
    def raw(self) -> str:
        """The turn as the model writes it."""
        found = [f"<think>\n{self.reasoning}\n</think>\n"] if self.reasoning else []
        found += [self.text] if self.text else []
        for name, given in self.calls:
            call = {"name": name, "arguments": {"input": given} if isinstance(given, str) else given}
            found.append(f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>")
        return "\n".join(found)

    def add(self, item: Mapping[str, Any]) -> None:
        """Add a message of a chat or of Anthropic's, or an item of a response, recorded or answered."""
        parts = item.get("content") or ()
        for part in [{"type": "text", "text": parts}] if isinstance(parts, str) else parts:
            if part["type"] == "tool_use":
                self._call(part["id"], part["name"], part["input"])
            elif part["type"] in ("thinking", "reasoning_text"):
                self.reasoning += part.get("thinking") or part.get("text")
            else:
                self.text += part["text"]
        self.reasoning += item.get("reasoning_content") or "".join(part["text"] for part in item.get("summary", ()))
        for call in item.get("tool_calls") or ():
            self._call(call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
        if "call_id" in item:
            name = f"{item['namespace']}.{item['name']}" if "namespace" in item else item["name"]
            self._call(item["call_id"], name, item["input"] if "input" in item else json.loads(item["arguments"]))

    def _call(self, id: str, name: str, given: Any) -> None:
        self.calls.append((name, given))
        self.ids.append(id)


def is_said(item: Mapping[str, Any]) -> bool:
    """Whether the model has said a message or an item."""
    return item.get("role") == "assistant" or item.get("type") in ("reasoning", "function_call", "custom_tool_call")


def turns(items: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Turn]]:
    """Yield the turns of the model in a conversation, each with the place at which it begins."""
    begin, turn = 0, Turn()
    for place, item in enumerate(items):
        if is_said(item):
            begin = begin if turn.raw else place
            turn.add(item)
        if turn.raw and (place + 1 == len(items) or not is_said(items[place + 1])):
            yield begin, turn
            turn = Turn()


def conversation(recording: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """Return the field that holds the conversation, and what it holds."""
    name = "input" if "input" in recording["body"] else "messages"
    return name, recording["body"][name]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serve")
    scripts = {
        f"{each['system']}{number}": turn.raw
        for each in RECORDINGS.values()
        for number, (_, turn) in enumerate(turns(conversation(each)[1]))
    }
    template = TEMPLATE.replace("NAMES", str([each["system"] for each in RECORDINGS.values()]))
    special, marks = ("<think>",), "<tool_call> <think> </think>"
    scripted_model(folder / "model", scripts, marks, special, template=template, context=40_000)
    limits = ("parallel.threads=1", "cache.num_blocks=2500", "serve.strict=true")
    with serving(folder, "model=./model", *limits) as started:
        yield started


def answered(text: str) -> Turn:
    """Put an answer together, whole or of its events, in any of the three forms."""
    turn = Turn()
    if not text.startswith(("data:", "event:")):
        turn.add(json.loads(text)["choices"][0]["message"])
        return turn
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    blocks: list[dict[str, Any]] = []
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for event in events:
        kind = event.get("type")
        if kind == "response.completed":
            for item in event["response"]["output"]:
                turn.add(item)
        elif kind == "content_block_start":
            blocks.append(event["content_block"] | {"json": ""})
        elif kind == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            key = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "json"}.get(delta["type"])
            if key is not None:
                block[key] += delta.get("partial_json", delta.get(key))
        for choice in event.get("choices", ()):
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    message["tool_calls"].append({"id": call["id"], "function": {**call["function"], "arguments": ""}})
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["json"])
    turn.add({"content": blocks} if blocks else message)
    return turn


@pytest.mark.parametrize("name", RECORDINGS)
def test_an_agents_conversation(server: Server, name: str) -> None:
    recording = RECORDINGS[name]
    where, items = conversation(recording)
    for begin, said in turns(items):
        body = recording["body"] | {where: items[:begin]}
        answer = httpx2.post(server.url + recording["path"], json=body, headers=recording["headers"])
        assert answer.status_code == 200, answer.text
        assert "x-ignored-fields" not in answer.headers
        found = answered(answer.text)
        assert found == said
        assert len(set(found.ids)) == len(said.ids)


def test_the_prefix_of_an_agents_prompt_is_found_again(server: Server) -> None:
    """A header in its system prompt is another one in each request."""
    recording = RECORDINGS["claude_code"]
    body = recording["body"] | {"messages": recording["body"]["messages"][:-1], "stream": False}
    counts = []
    for hash in ("1f2e3", "987654"):  # the template writes lengths
        header = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.100.7b4; cch={hash};"}
        own = {"type": "text", "text": "No other test has this prompt, which begins in its own way."}
        asked = body | {"system": [header, own, *body["system"][1:]]}
        usage = httpx2.post(server.url + recording["path"], json=asked).json()["usage"]
        counts.append(usage["input_tokens"])  # that were not found
    assert counts[1] <= 16 < counts[0]


LOOK: dict[str, Any] = {"role": "user", "content": "look"}
IMAGE: dict[str, Any] = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
SEARCH: dict[str, Any] = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("claude_code", {"tools": [SEARCH], "tool_choice": {"type": "any"}}, "WebSearch"),
    ("claude_code", {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]: "),
    ("claude_code", {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management: "),
    ("codex", {"tools": [{"type": "web_search"}], "tool_choice": "required"}, 'web_search = "disabled"'),
    ("codex", {"previous_response_id": "resp_1"}, "previous_response_id: "),
    ("codex", {"store": True}, "store: "),
    ("codex", {"input": [{"type": "compaction", "encrypted_content": "x"}]}, "compaction items are not supported"),
    (
        "codex",
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input_image parts",
    ),
    ("opencode", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url parts"),
    ("opencode", {"web_search_options": {"search_context_size": "low"}}, "web_search_options: "),
    ("opencode", {"max_tokens": 40_000, "messages": [LOOK]}, "maximum context length"),
]


@pytest.mark.parametrize(("name", "fields", "text"), REFUSED, ids=range(len(REFUSED)))
def test_what_agents_ask_in_vain_is_named(server: Server, name: str, fields: dict[str, Any], text: str) -> None:
    recording = RECORDINGS[name]
    system = [LOOK | {"role": "system", "content": recording["system"]}] if name == "opencode" else []
    fields = fields | ({"messages": [*system, *fields["messages"]]} if system and "messages" in fields else {})
    answer = httpx2.post(server.url + recording["path"], json=recording["body"] | fields)
    assert (answer.status_code, text in answer.json()["error"]["message"]) == (400, True), answer.text
