"""Bodies made of the types that OpenAI and Anthropic publish: null is as absent, 1.0 as 1, at any depth."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from openai.types import completion_create_params as completion
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as response

from tests.support.published import Variant, variants
from tests.support.scripted import scripted_model
from tests.support.server import Server, serving

USER = [{"role": "user", "content": "say"}]
LEAST: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "say", "max_tokens": 1},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 1},
    "/v1/responses": {"input": USER, "max_output_tokens": 1},
    "/v1/messages": {"messages": USER, "max_tokens": 1},
}
OPENAI: dict[str, Any] = {
    "/v1/completions": completion.CompletionCreateParamsNonStreaming,
    "/v1/chat/completions": chat.CompletionCreateParamsNonStreaming,
    "/v1/responses": response.ResponseCreateParamsNonStreaming,
}
LARGE = ("/v1/responses", "/v1/messages")  # of which there are a thousand bodies and more
TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor -%}
{%- for message in messages %}{{ message.role }}{% if message.content is string %}{{ message.content }}{% else -%}
{%- for part in message.content or [] %}{{ part.text }}{% endfor %}{% endif -%}
{%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{% endfor -%}
<|say0|>{# MARKS #}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serve")
    scripted_model(folder / "model", {"say0": "Some words."}, "<tool_call>", template=TEMPLATE)
    names = "serve.model_name='*'"
    with serving(folder, "model=./model", names, "parallel.threads=1", "cache.num_blocks=300") as started:
        yield started


def published(path: str) -> Iterator[Variant]:
    if path == "/v1/messages":
        kind = pytest.importorskip("anthropic.types.message_create_params").MessageCreateParamsNonStreaming
    else:
        kind = OPENAI[path]
    return (each for each in variants(kind) if each.path and each.path[0] != "stream")


def body(path: str, variant: Variant, value: Any) -> dict[str, Any]:
    """Return a whole body with the field that a variant changes; a list of messages keeps the user's behind it."""
    name, least = str(variant.path[0]), LEAST[path]
    if name not in value:
        return {key: each for key, each in least.items() if key != name}
    asked = value[name]
    if isinstance(least.get(name), list) and isinstance(asked, list):
        asked = [*asked, *least[name]]
    return {**least, "temperature": 0, name: asked}


def said(answer: httpx2.Response) -> tuple[int, str | None]:
    """Return an answer's status and, of an error, the line."""
    found = answer.json()
    return answer.status_code, found["error"]["message"] if found.get("error") else None


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=[pytest.mark.slow] if path in LARGE else []) for path in LEAST]
)
def test_published_bodies(server: Server, path: str) -> None:
    wrong, statuses = list[str](), set[int]()
    known: dict[str, tuple[int, str | None]] = {}
    with httpx2.Client(base_url=server.url, timeout=60) as client:

        def ask(asked: dict[str, Any]) -> tuple[int, str | None]:
            text = json.dumps(asked)
            if text not in known:
                known[text] = said(client.post(path, content=text))
            return known[text]

        for each in published(path):
            asked = body(path, each, each.value)
            status, line = ask(asked)
            statuses.add(status)
            place = str(each.path[0])
            if status not in (200, 400) or (line is not None and not line.startswith((place, "messages: "))):
                wrong.append(f"{status} {line}: {asked}")
            if each.kind != "value" and (status, line) != (alike := ask(body(path, each, each.alike))):
                wrong.append(f"{each.kind} at {each.path}: {status} {line}, not {alike}: {asked}")
    assert wrong == []
    assert statuses == {200, 400}
