"""HTTP as clients, proxies and browsers speak it: where requests end, what each answer bears, who may read it."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import re
import shutil
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import httpx2
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

import gapless.models
from benchmarks import http_faults
from gapless.conf.errors import ConfigError
from gapless.conf.schema import ServeConfig
from gapless.conf.serving import ServingConfig
from gapless.launch.compose import compose_one
from gapless.launch.serve import _bind
from gapless.launch.server.app import make_app
from gapless.launch.server.body_limit import BodyLimit
from gapless.launch.server.route import Route
from gapless.launch.server.service import Service
from tests.support.server import Server, serving
from tests.support.tiers import HANGS_S

BODY = b'{"prompt": "import os", "max_tokens": 2}'
INNER = b"GET /inner HTTP/1.1\r\nHost: a\r\n\r\n"
NEXT = b"GET /version HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
ORIGIN = "https://chat.example"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ '<a>' if add_generation_prompt }}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serve")
    shutil.copytree(Path(gapless.models.__path__[0]) / "shipped", folder / "model")
    (folder / "model/chat_template.jinja").write_text(TEMPLATE)
    overrides = ("model=./model", "serve.max_body_mib=4", "serve.max_waiting=8", f"serve.allowed_origins=['{ORIGIN}']")
    with serving(folder, *overrides, *http_faults.LIMITS) as started:
        yield started


def sent(server: Server, *pieces: bytes) -> bytes:
    """Send pieces on one connection; return all that comes until the server closes it."""
    where, got = urlsplit(server.url), b""
    with socket.create_connection((str(where.hostname), int(where.port or 0)), timeout=HANGS_S) as sock:
        for piece in pieces:
            sock.sendall(piece)
            time.sleep(0.1 if len(pieces) > 1 else 0)
        while piece := sock.recv(1 << 16):
            got += piece
    return got


def statuses(answers: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answers)]


def chunks(body: bytes, trailer: bytes = b"") -> bytes:
    return b"%x\r\n%s\r\n0\r\n%s\r\n" % (len(body), body, trailer)


@pytest.mark.parametrize(
    "pieces",
    [
        (POST + UPGRADE + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY + NEXT,),
        (POST + UPGRADE + b"Content-Length: %d\r\n\r\n" % len(BODY), BODY, NEXT),
        (POST + UPGRADE + b"Transfer-Encoding: chunked\r\n\r\n" + chunks(BODY) + NEXT,),
        (POST + UPGRADE + b"Transfer-Encoding: chunked\r\n\r\n", chunks(BODY)[:20], chunks(BODY)[20:] + NEXT),
        ((POST + UPGRADE)[:90], (POST + UPGRADE)[90:] + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY + NEXT),
        (b"GET /version HTTP/1.1\r\nHost: a\r\n" + UPGRADE + b"\r\n" + NEXT,),
    ],
)
def test_an_offer_to_upgrade_is_passed_over(server: Server, pieces: tuple[bytes, ...]) -> None:
    assert statuses(sent(server, *pieces)) == [200, 200]


def test_the_body_of_an_upgrade_is_no_request(server: Server) -> None:
    got = sent(server, POST + UPGRADE + b"Content-Length: %d\r\n\r\n" % len(INNER), INNER)
    assert statuses(got) == [400]
    assert b"not JSON" in got


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (POST + b"Content-Length: 5\r\nContent-Length: 6\r\n", 400),
        (POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", 400),
        (POST + b"Transfer-Encoding: gzip, chunked\r\n", 400),
        (b"POST /v1/completions HTTP/1.0\r\nTransfer-Encoding: chunked\r\n", 400),
        (POST + b"Host: b\r\n", 400),
        (b"GET /version HTTP/1.1\r\nHost: a b\r\n", 400),
        (b"GET /version HTTP/1.1\r\nHost: a@b\r\n", 400),
        (b"GET http:///version HTTP/1.1\r\nHost: a\r\n", 400),
        (b"GET * HTTP/1.1\r\nHost: a\r\n", 400),
        (b"GET /version HTTP/1.1\r\n", 400),
        (b"GET /version HTTP/2.0\r\nHost: a\r\n", 400),
        (b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n", 400),
        (POST + b"X: " + b"a" * 66_000 + b"\r\n", 431),
        (POST + b"X: a\r\n" * 12_000, 431),
    ],
)
def test_a_head_that_proxies_may_read_otherwise_is_refused(server: Server, head: bytes, status: int) -> None:
    """Also in two pieces. What stands behind it is not read, and the connection is closed."""
    for pieces in ((head + b"\r\n" + INNER,), (head[:50], head[50:] + b"\r\n" + INNER)):
        got = sent(server, *pieces)
        assert statuses(got) == [status]
        assert set(json.loads(got.partition(b"\r\n\r\n")[2])) == {"error"}


@pytest.mark.parametrize(
    ("method", "target", "same"),
    [
        ("GET", "/version/", "/version"),
        ("GET", "/v1/models/?a=b", "/v1/models"),
        ("GET", "http://b", "/"),
        ("GET", "HTTP://b/version", "/version"),
        ("GET", "http://b?a=b", "/"),
        ("OPTIONS", "*", "/"),
        ("GET", "/v1/models//", "/v1/models"),
    ],
)
def test_the_forms_of_a_target(server: Server, method: str, target: str, same: str) -> None:
    """None is answered with a redirect, which would be to another scheme or host than the client's behind a proxy."""
    rest = b" HTTP/1.1\r\nHost: [::1]:80\r\nX-Request-Id: mine \t\r\nConnection: close\r\n\r\n"
    found, expected = (sent(server, f"{method} {each}".encode() + rest) for each in (target, same))
    assert statuses(found)[0] in (200, 204)
    assert found.partition(b"\r\n\r\n")[2] == expected.partition(b"\r\n\r\n")[2]
    assert b"x-request-id: mine\r\n" in found


def test_an_answer_under_way_comes_whole_before_a_refusal_closes(server: Server) -> None:
    got = sent(server, POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY + b"no HTTP\r\n\r\n" + NEXT)
    assert statuses(got) == [200]
    assert json.loads(got.partition(b"\r\n\r\n")[2])["choices"]


def test_a_body_after_its_answer_gets_no_second_one(server: Server) -> None:
    """Neither where it comes whole nor where it is never complete, and the connection ends."""
    head = b"POST /nothing HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n"
    assert statuses(sent(server, head, b"x" * 99)) == [404]
    assert statuses(sent(server, head, b"x" * 9)) == [404]


def test_trailers_are_no_headers(server: Server) -> None:
    trailer = b"X-Request-Id: trailer\r\nContent-Encoding: br\r\n"
    got = sent(server, POST + b"Transfer-Encoding: chunked\r\n\r\n", chunks(BODY, trailer) + NEXT)
    assert statuses(got) == [200, 200]
    assert b"trailer" not in got


def test_faults_of_a_grammar(server: Server) -> None:
    """No connection gets more answers than h11 reads requests on it, a 5xx, or no end: benchmarks.http_faults."""
    where = urlsplit(server.url)
    requests = islice(http_faults.faulty(1), 300)
    counts, wrong = asyncio.run(http_faults.send(str(where.hostname), int(where.port or 0), requests, 100))
    assert counts.total() == 300
    assert wrong == []


def test_http_1_0_gets_no_chunks(server: Server) -> None:
    body = BODY[:-1] + b', "stream": true}'
    got = sent(server, b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    head, _, events = got.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert events.startswith(b"data: {")
    assert events.endswith(b"data: [DONE]\n\n")


def test_a_client_that_waits_to_send_its_body(server: Server) -> None:
    """It is told to go on; where it gets an answer instead, nobody can tell what it sends next."""
    expecting = b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(BODY)
    assert statuses(sent(server, POST + expecting, BODY + NEXT)) == [100, 200, 200]
    got = sent(server, b"POST /nothing HTTP/1.1\r\nHost: a\r\n" + expecting, NEXT)
    assert statuses(got) == [404]
    assert b"connection: close" in got


@pytest.mark.parametrize("path", ["/", "/health", "/health/live", "/v1/models", "/metrics", "/live/events", "/nothing"])
def test_head_is_get_without_the_body(server: Server, path: str) -> None:
    head = httpx2.head(server.url + path)
    with httpx2.stream("GET", server.url + path) as get:
        assert head.status_code == get.status_code
        assert head.headers.get("content-type") == get.headers.get("content-type")
    assert head.content == b""


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("OPTIONS", "/v1/completions", 204, "POST, OPTIONS"),
        ("OPTIONS", "/health", 204, "GET, HEAD, OPTIONS"),
        ("OPTIONS", "/nothing", 404, None),
        ("PUT", "/v1/models", 405, "GET, HEAD, OPTIONS"),
        ("PUT", "/v1/chat/completions", 405, "POST, OPTIONS"),
        ("HEAD", "/v1/completions", 405, "POST, OPTIONS"),
    ],
)
def test_methods(server: Server, method: str, path: str, status: int, allow: str | None) -> None:
    answer = httpx2.request(method, server.url + path)
    assert (answer.status_code, answer.headers.get("allow")) == (status, allow)
    if allow and (status, method) == (405, "PUT"):
        assert answer.json()["error"]["message"] == f"PUT {path}: this path takes {allow.removesuffix(', OPTIONS')}"


@pytest.mark.parametrize("own", ["mine-1", "Root=1-6789;Sampled=1", "{3f25}#17", "a" * 180, "", "é", None])
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", BODY), ("/v1/completions", b"{"), ("/nothing", b"")])
def test_each_answer_has_a_request_id(server: Server, own: str | None, path: str, body: bytes) -> None:
    """The client's own, where a header can hold it; the answer's id has it too, or the new one."""
    headers = {} if own is None else {"x-request-id": own.encode()}
    answer = httpx2.post(server.url + path, content=body, headers=headers)
    id = answer.headers["x-request-id"]
    assert (id == own) == (own not in (None, "", "é"))
    if answer.status_code == 200 and re.fullmatch(r"[\w.-]{1,128}", id):
        assert answer.json()["id"] == f"cmpl-{id}"


def test_a_refusal_has_a_request_id(server: Server) -> None:
    assert b"x-request-id: mine" in sent(
        server, POST + b"X-Request-Id: mine\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
    )
    assert b"x-request-id: " in sent(server, b"no HTTP\r\n\r\n")


def test_sites_that_are_allowed_may_call(server: Server) -> None:
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    url = f"{server.url}/v1/completions"
    answer = httpx2.options(url, headers={"origin": ORIGIN, **ask})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in answer.headers["access-control-allow-headers"]
    for content, status in ((BODY, 200), (b"{", 400)):
        answer = httpx2.post(url, content=content, headers={"origin": ORIGIN})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, ORIGIN)
    other = {"origin": "https://other.example"}
    assert "access-control-allow-origin" not in httpx2.options(url, headers={**other, **ask}).headers
    assert "access-control-allow-origin" not in httpx2.post(url, content=BODY, headers=other).headers


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/", "https://chat.example/page"])
def test_what_is_no_origin_is_said(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"serve\.allowed_origins"):
        compose_one([f"serve.allowed_origins=['{origin}']"], ServeConfig, "serve")


@pytest.mark.parametrize(
    ("encoding", "content", "status"),
    [
        ("gzip", gzip.compress(BODY), 200),
        ("X-GZIP", gzip.compress(BODY[:9]) + gzip.compress(BODY[9:]), 200),
        ("deflate", zlib.compress(BODY), 200),
        ("identity", BODY, 200),
        ("", BODY, 200),
        ("gzip", gzip.compress(BODY)[:-3], 400),
        ("gzip", BODY, 400),
        ("gzip", gzip.compress(b" " * (9 << 20)), 413),
        ("gzip", gzip.compress(b" " * (2 << 20)) * 3, 413),
        ("br", BODY, 415),
        ("gzip, gzip", BODY, 415),
    ],
    ids=itertools.count(),
)
def test_compressed_bodies(server: Server, encoding: str, content: bytes, status: int) -> None:
    answer = httpx2.post(f"{server.url}/v1/completions", content=content, headers={"content-encoding": encoding})
    assert answer.status_code == status, answer.text
    assert ("accept-encoding" in answer.headers) == (status == 415)


def test_the_event_loop_goes_on_while_a_body_is_decompressed() -> None:
    content, turns, body = zlib.compress(b" " * (16 << 20)), 0, b""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal turns, body
        before = turns
        body = (await receive())["body"]
        turns -= before

    async def receive() -> Message:
        return {"type": "http.request", "body": content}

    async def send(message: Message) -> None:
        raise AssertionError(message)

    async def count() -> None:
        nonlocal turns
        while not body:
            turns += 1
            await asyncio.sleep(0)

    async def both() -> None:
        headers = [(b"content-encoding", b"deflate")]
        await asyncio.gather(count(), BodyLimit(app, 32 << 20)({"type": "http", "headers": headers}, receive, send))

    asyncio.run(both())
    assert body == b" " * (16 << 20)
    assert turns > 10


@pytest.mark.parametrize("path", ["embeddings", "images/generations"])
def test_paths_for_other_models_are_named(server: Server, path: str) -> None:
    answer = httpx2.post(f"{server.url}/v1/{path}", json={"input": "x", "model": "model"})
    text = answer.json()["error"]["message"]
    assert (answer.status_code, text.startswith(f"POST /v1/{path}: "), "generates text" in text) == (404, True, True)


TOO_LONG = "context_length_exceeded"
OUTSIDE: tuple[dict[str, Any], ...] = (
    {"logit_bias": {"99999": 1}},
    {"allowed_token_ids": [-1]},
    {"stop_token_ids": [99999]},
)


def chat(content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": True}}


NAMED = {"type": "function", "function": {"name": "g"}}
WRONG = {"type": "object", "properties": {"a": {"type": 5}}}
REFUSED: list[tuple[str, dict[str, Any], str, str | None]] = [
    *(("completions", {"prompt": "x", **field}, next(iter(field)), None) for field in OUTSIDE),
    *(("chat/completions", chat("x", **field), next(iter(field)), None) for field in OUTSIDE),
    ("completions", {"prompt": [65] * 3000}, "prompt", TOO_LONG),
    ("completions", {"prompt": "x" * 3_000_000}, "prompt", TOO_LONG),  # so long that it is not even encoded
    ("completions", {"prompt": "x", "max_tokens": 3000}, "max_tokens", TOO_LONG),
    ("completions", {"prompt": "x", "n": 9}, "n", None),
    ("chat/completions", chat("x " * 3000), "messages", TOO_LONG),
    ("chat/completions", chat("x" * 3_000_000), "messages", TOO_LONG),
    ("chat/completions", chat("x", max_completion_tokens=3000), "max_completion_tokens", TOO_LONG),
    ("chat/completions", chat([{"type": "image_url"}]), "messages[0].content[0]", None),
    ("chat/completions", chat(5), "messages[0].content", None),
    ("chat/completions", chat("x", tools=[{}]), "tools[0].type", None),
    ("chat/completions", chat("x", tools=[tool("a b")]), "tools[0].function.name", None),
    ("chat/completions", chat("x", tools=[tool("f"), tool("f")]), "tools[1].function.name", None),
    ("chat/completions", chat("x", tools=[tool("f", {"type": "array"})]), "tools[0].function", None),
    ("chat/completions", chat("x", tools=[tool("f")], tool_choice="any"), "tool_choice", None),
    ("chat/completions", chat("x", tool_choice="required"), "tool_choice", None),
    ("chat/completions", chat("x", tools=[tool("f")], tool_choice=NAMED), "tool_choice", None),
    ("chat/completions", chat("x", tools=[tool("f", WRONG)], tool_choice="required"), "tools", None),
    ("chat/completions", chat("x", thinking_token_budget=5), "thinking_token_budget", None),
    ("chat/completions", chat("x", functions=[{"name": "f"}]), "functions", None),
    ("chat/completions", chat("x", store=True), "store", None),
    ("completions", {"prompt": "x", "tools": [{}]}, "tools", None),
    ("responses", {"input": "x", "tools": [{"type": "mcp"}], "tool_choice": "required"}, "tool_choice", None),
    ("responses", {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id", None),
    ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", None),
    ("chat/completions", chat("x", response_format={"type": "json_schema"}), "response_format.json_schema", None),
    ("responses", {"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema", None),
    ("responses", {"input": "x " * 3000}, "input", TOO_LONG),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", None),
    ("responses", {"input": [{"role": "user"}]}, "input[0].content", None),
    ("responses", {"input": [{"type": "function_call_output"}]}, "input[0].output", None),
    (
        "responses",
        {"input": "x", "text": {"format": {"type": "json_schema", "schema": {"type": 5}}}},
        "text.format",
        None,
    ),
]


@pytest.mark.parametrize(("path", "body", "param", "code"), REFUSED)
def test_a_refusal_names_the_field(
    server: Server, path: str, body: dict[str, Any], param: str, code: str | None
) -> None:
    answer = httpx2.post(f"{server.url}/v1/{path}", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code), error
    assert ("This model's maximum context length is 2048 tokens" in error["message"]) == (code is not None)


def test_a_fault_of_ours_has_the_body_of_an_error() -> None:
    async def fail(service: Service, request: Request) -> Response:
        raise ZeroDivisionError

    unused = cast(Any, SimpleNamespace(config=ServingConfig()))
    app = make_app(unused, [Route(path="/fault", handler=fail, needs_key=False)])

    async def ask() -> httpx2.Response:
        transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://a") as client:
            return await client.get("/fault")

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")


def test_another_model_is_named_before_what_it_might_take(server: Server) -> None:
    answer = httpx2.post(f"{server.url}/v1/chat/completions", json=chat("x " * 3000, model="other"))
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")


def test_unknown_fields_are_named(server: Server) -> None:
    answer = httpx2.post(f"{server.url}/v1/completions", json={"prompt": "x", "temprature": 1, "metadata": {"a": "b"}})
    assert answer.headers["x-ignored-fields"] == "temprature"
    for _ in range(2):
        httpx2.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 1, "temprature": 1})
    assert server.log.count("ignoring unknown field temprature") == 1


@pytest.mark.slow
def test_a_strict_server_refuses_unknown_fields(tmp_path: Path) -> None:
    with serving(tmp_path, "serve.strict=true", *http_faults.LIMITS) as strict:
        for field, status in (("temprature", 400), ("metadata", 200)):
            body = {"prompt": "x", "max_tokens": 1, field: {"a": "b"}}
            answer = httpx2.post(f"{strict.url}/v1/completions", json=body)
            assert answer.status_code == status
        assert "temprature" in httpx2.post(f"{strict.url}/tokenize", json={"prompt": "x", "temprature": 1}).text


def test_a_message_is_continued(server: Server) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "imp"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    tokens = httpx2.post(f"{server.url}/tokenize", json=body).json()["tokens"]
    text = httpx2.post(f"{server.url}/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert text == "<user>x<assistant>imp"


def test_a_response_says_again_what_was_asked(server: Server) -> None:
    asked = {"instructions": "kind", "metadata": {"a": "b"}, "max_output_tokens": 1, "temperature": 0.5, "top_p": 0.9}
    answer = httpx2.post(f"{server.url}/v1/responses", json={"input": "x", **asked}).json()
    assert {name: answer[name] for name in asked} == asked
    events = httpx2.post(f"{server.url}/v1/responses", json={"input": "x", "stream": True, "max_output_tokens": 1}).text
    last = json.loads([line[6:] for line in events.splitlines() if line.startswith("data: {")][-1])["response"]
    assert [last[name] for name in asked] == [None, {}, 1, 1.0, 1.0]


def test_responses_have_log_probabilities(server: Server) -> None:
    body = {"input": "x", "max_output_tokens": 3, "temperature": 0, "include": ["message.output_text.logprobs"]}
    (plain,) = httpx2.post(f"{server.url}/v1/responses", json=body).json()["output"][0]["content"]
    assert [each["top_logprobs"] for each in plain["logprobs"]] == [[]] * 3
    body |= {"top_logprobs": 2, "stream": True}
    lines = httpx2.post(f"{server.url}/v1/responses", json=body).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [event["logprobs"][0] for event in events if event["type"] == "response.output_text.delta"]
    assert [each["logprob"] for each in deltas] == pytest.approx([each["logprob"] for each in plain["logprobs"]])
    assert [len(each["top_logprobs"]) for each in deltas] == [2] * 3
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == deltas


def test_offsets_are_places_in_the_text(server: Server) -> None:
    """Tokens of one character begin where it does, in whole answers as in streams, and behind an echo."""
    text = "naïve 漢字 😀 end"
    body = {"prompt": "é", "echo": True, "structured_outputs": {"choice": [text]}, "logprobs": 0, "max_tokens": 60}
    whole = httpx2.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]
    lines = httpx2.post(f"{server.url}/v1/completions", json=body | {"stream": True}).text.splitlines()
    choices = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    offsets, tokens = whole["logprobs"]["text_offset"], whole["logprobs"]["tokens"]
    assert [offset for each in choices if each["logprobs"] for offset in each["logprobs"]["text_offset"]] == offsets
    assert whole["text"] == "é" + text
    ends = [*offsets[1:], len(whole["text"])]
    places = zip(tokens, offsets, ends, strict=True)
    clear = [each for each in places if each[0].isascii() and not each[0].startswith("bytes:")]
    assert len(clear) > 5
    assert all(whole["text"].startswith(token, begin) or begin == end for token, begin, end in clear)


@pytest.mark.parametrize(
    ("host", "clients"),
    [
        ("::", ["127.0.0.1", "::1"]),
        ("[::1]", ["::1"]),
        ("'[::]'", ["127.0.0.1"]),
        ("localhost", ["127.0.0.1", "::1"]),
        ("127.0.0.1", ["127.0.0.1"]),
    ],
)
def test_hosts_of_both_families(host: str, clients: list[str]) -> None:
    listeners = _bind(compose_one([f"serve.host={host}", "serve.port=0"], ServeConfig, "serve"))
    for client in clients:
        socket.create_connection((client, listeners[0].getsockname()[1]), timeout=HANGS_S).close()
    for listener in listeners:
        listener.close()


def test_localhost_without_ipv6() -> None:
    code = (
        "from gapless.conf.schema import ServeConfig; from gapless.launch.compose import compose_one; "
        "from gapless.launch.serve import _bind; "
        "bound = _bind(compose_one(['serve.host=localhost', 'serve.port=0'], ServeConfig, 'serve')); "
        "print([each.getsockname()[0] for each in bound])"
    )
    alone = ["unshare", "--map-root-user", "--net", "sh", "-c"]
    off = "ip link set lo up && sysctl -qw net.ipv6.conf.lo.disable_ipv6=1"
    if subprocess.run([*alone, off], capture_output=True, check=False).returncode != 0:
        pytest.skip("network namespaces are not permitted here")
    done = subprocess.run(
        [*alone, f'{off} && "$0" -c "$1"', sys.executable, code], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "['127.0.0.1']", done.stderr


def test_connections_send_each_token_at_once() -> None:
    (listener,) = _bind(compose_one(["serve.port=0"], ServeConfig, "serve"))
    with listener, socket.create_connection(listener.getsockname(), timeout=HANGS_S), listener.accept()[0] as accepted:
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
