"""Errors in the words, types and statuses of each API's maker, by which clients recover."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest

import gapless.models
from gapless.launch.server.endpoints.messages import MessageAnswer
from gapless.launch.server.errors import ApiError
from gapless.launch.server.messages_input import MessagesBody
from gapless.launch.server.routes import error_response
from gapless.models.tokenizer import ByteTokenizer
from tests.support.server import Server, serving

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
CONTEXT, ROOM = 256, 128  # the cache holds less than the context
FIELDS = {"completions": "max_tokens", "chat/completions": "max_completion_tokens", "responses": "max_output_tokens"}
FIELDS["messages"] = "max_tokens"
GENERATES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
ABSENT = ("rerank", "score", "classify", "pooling", "v1/embeddings", "v1/images/edits", "v1/audio/speech", "api/chat")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serve")
    shutil.copytree(Path(gapless.models.__path__[0]) / "shipped", folder / "model")
    (folder / "model/chat_template.jinja").write_text(TEMPLATE)
    cache = ("cache.block_size=16", f"cache.num_blocks={ROOM // 16}", "scheduler.batch=1")
    limits = (f"model.max_model_len={CONTEXT}", "serve.max_body_mib=1", "serve.max_waiting=2", *cache)
    with serving(folder, "model=./model", "serve.api_keys=[right]", *limits) as started:
        yield started


def ask(server: Server, path: str, text: str, most: int, key: str | None = "right", **fields: Any) -> httpx2.Response:
    chat = [{"role": "user", "content": text}]
    body: dict[str, Any] = {"prompt": text} if path == "completions" else {"messages": chat}
    body = {"input": text} if path == "responses" else body
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx2.post(f"{server.url}/v1/{path}", json={**body, FIELDS[path]: most, **fields}, headers=headers)


@pytest.mark.parametrize("path", FIELDS)
@pytest.mark.parametrize("most", [ROOM, CONTEXT - 8, CONTEXT, 32_000])
def test_an_output_that_is_too_long_gets_the_sum(server: Server, path: str, most: int) -> None:
    answer = ask(server, path, "word " * 10, most)
    error = answer.json()["error"]
    if path == "messages":
        pattern = r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+), decrease"
        found = re.match(pattern, error["message"])
    else:
        found = re.search(
            r"This model's maximum context length is (\d+) tokens\. However, you requested (\d+) tokens "
            r"\((\d+) in the \w+, (\d+) in the completion\)\. Please reduce the length of the",
            error["message"],
        )
        assert error["code"] == "context_length_exceeded"
    assert (answer.status_code, error["type"], found is not None) == (400, "invalid_request_error", True), error
    assert found is not None
    if path == "messages":  # the client asks for what is left
        prompt, asked, limit = map(int, found.groups())
    else:
        limit, total, prompt, asked = map(int, found.groups())
        assert total == prompt + asked
    assert prompt + asked > limit
    assert ask(server, path, "word " * 10, ROOM - prompt).status_code == 200


@pytest.mark.parametrize("path", FIELDS)
@pytest.mark.parametrize("words", [ROOM, CONTEXT, 1 << 17])
def test_a_prompt_that_is_too_long_gets_both_numbers(server: Server, path: str, words: int) -> None:
    error = ask(server, path, "word " * words, 1).json()["error"]
    if path == "messages":
        found = re.match(r"prompt is too long: (\d+) tokens > (\d+) maximum", error["message"])
        assert found is not None, error
        assert int(found[1]) > int(found[2])
    else:
        assert "This model's maximum context length is" in error["message"]
        assert error["code"] == "context_length_exceeded"


def test_a_stream_of_responses_fails_as_openai_s(server: Server) -> None:
    text = ask(server, "responses", "word " * CONTEXT, 1, stream=True).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    kinds = ["response.created", "response.in_progress", "error", "response.failed"]
    assert [event["type"] for event in events] == kinds
    assert [event["sequence_number"] for event in events] == list(range(4))
    for error in (events[2]["error"], events[3]["response"]["error"]):
        assert error["code"] == "context_length_exceeded"
        assert error["message"].startswith("Your input exceeds the context window of this model.")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="right", max_retries=0)
    with pytest.raises(openai.APIError, match="exceeds the context window"):
        list(client.responses.create(model="model", input="word " * CONTEXT, stream=True))


def test_keys_and_models(server: Server) -> None:
    for key, said in ((None, "You didn't provide an API key"), ("wrong", "Incorrect API key provided")):
        error = ask(server, "chat/completions", "x", 1, key).json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert error["message"].startswith(said)
        assert "wrong" not in error["message"]
    for key, said in ((None, "x-api-key header is required"), ("wrong", "invalid x-api-key")):
        answer = ask(server, "messages", "x", 1, key)
        error = {"type": "authentication_error", "message": said}
        assert answer.json() == {"type": "error", "error": error, "request_id": answer.headers["x-request-id"]}
        assert answer.headers["request-id"] == answer.headers["x-request-id"]
    error = ask(server, "chat/completions", "x", 1, model="gpt-9").json()["error"]
    assert error["message"].startswith("The model `gpt-9` does not exist")
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "model", "model_not_found")
    client = anthropic.Anthropic(base_url=server.url, api_key="right", max_retries=0)
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(model="claude-9", max_tokens=1, messages=[{"role": "user", "content": "x"}])
    assert unknown.value.body["error"] == {"type": "not_found_error", "message": "model: claude-9"}  # type: ignore[index]
    large = ask(server, "messages", "x" * (1 << 20), 1)
    assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    ("error", "status", "openai_type", "anthropic_type"),
    [
        (ApiError(400, "x"), 400, "invalid_request_error", "invalid_request_error"),
        (ApiError(403, "x"), 403, "invalid_request_error", "permission_error"),
        (ApiError(415, "x"), 415, "invalid_request_error", "invalid_request_error"),
        (ApiError(429, "x"), 429, "requests", "rate_limit_error"),
        (ApiError(429, "x", is_overload=True), 529, "requests", "overloaded_error"),
        (ApiError(500, "x"), 500, "server_error", "api_error"),
        (ApiError(503, "x"), 529, "server_error", "overloaded_error"),
        (ApiError(504, "x"), 504, "server_error", "timeout_error"),
    ],
)
def test_types_and_statuses(error: ApiError, status: int, openai_type: str, anthropic_type: str) -> None:
    found = error_response(error, {"path": "/v1/messages", "state": {"request_id": "r1"}})
    body = {"type": "error", "error": {"type": anthropic_type, "message": "x"}, "request_id": "r1"}
    assert (found.status_code, json.loads(bytes(found.body))) == (status, body)
    found = error_response(error, {"path": "/v1/chat/completions"})
    assert (found.status_code, json.loads(bytes(found.body))["error"]["type"]) == (error.status, openai_type)
    stream = MessageAnswer("m", [[1]], MessagesBody(messages=[{}]), ByteTokenizer(256)).error(error)
    assert stream == b"event: error\ndata: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


@pytest.mark.parametrize("path", ABSENT)
def test_a_path_that_is_absent_says_which_ones_generate(server: Server, path: str) -> None:
    answer = httpx2.post(f"{server.url}/{path}", json={"model": "model", "input": "x"})
    text = answer.json()["error"]["message"]
    assert (answer.status_code, text.startswith(f"POST /{path}: ")) == (404, True)
    assert [each for each in GENERATES if each not in text] == []


def test_threads_are_refused_in_the_form_at_which_the_client_sends_whole_histories(server: Server) -> None:
    answer = ask(server, "messages", "hi", 4, thread={"type": "create"})
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert (answer.status_code, answer.json()["error"]["details"]) == (400, details)
    assert ask(server, "messages", "hi", 4, thread=None).status_code == 200
