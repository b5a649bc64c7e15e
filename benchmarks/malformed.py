"""Sends malformed bodies to a server and checks that each is answered: `python -m benchmarks.malformed`.

Bodies are truncated, nested too deep, of wrong types or absurd sizes, contain broken tools, or are not UTF-8 or JSON.
They go to every path that accepts a POST, over `--clients` connections. Prints the answers by path and status. Fails if
an answer is a server error (5xx) or takes more than `MOST_SECONDS`, if a valid request in between gets another answer
than at first, or if a request is still running at the end. Overrides of the server follow the options; its model is the
package's, with a chat template. Three minutes for 10,000 on 2 cores.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2

import gapless.models
from gapless.launch.server.routes import ROUTES

from .support.harness import Benchmark, say, scratch
from .support.server import Server, gapless_server

BODIES = {route.path: route.body for route in ROUTES if route.body is not None}
PATHS = (*BODIES, "/record")
_CHAT = [{"role": "user", "content": "x"}]
_GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/chat/completions": {"messages": _CHAT, "max_tokens": 2, "max_completion_tokens": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/v1/messages": {"messages": _CHAT, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": _CHAT, "max_tokens": 2},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
    "/record": {},
}
# fmt: off
_VALUES = (
    None, True, 0, -1, 2**31, 2**64, 10**40, 10**4000, 1.5, 1e308, -0.0,
    "", "x", "\0", "\ud800", "\udc00\ud800",
    [], [[]], [1], ["a", 1], {}, {"a": 1}, {"\ud800": 1}, [None], [[1, 2], [3]], [-5], [2**31], [True], ["\ud800"],
    [""], "a" * 5000, [_CHAT], {"role": "user"}, [{"role": "\0", "content": [{"type": "text", "text": None}]}],
    [{"role": "user", "content": "x", "tool_calls": [{"function": {}}]}],
)
_FORMS: tuple[dict[str, Any], ...] = (
    {"regex": "((((a{1,1000}){1,1000}){1,1000}){1,1000})"}, {"regex": "(a|aa|aaa)*" * 500}, {"regex": "(" * 5000},
    {"regex": "\0"}, {"regex": "[\ud800]"},
    {"grammar": "start: start"}, {"grammar": "start: /" + "a?" * 5000 + "/"}, {"grammar": "\0" * 100},
    {"choice": []}, {"choice": ["a" * 5000] * 20}, {"choice": [1]},
    {"json": "{"}, {"json": {"$ref": "#"}}, {"json": {"$ref": "http://localhost/schema"}},
    {"json": {"type": "array", "minItems": 10**9}}, {"json": {"type": "string", "minLength": 2**40}},
    {"json": {"enum": [[]] * 2000}}, {"json": False}, {"json": {"allOf": [{"$ref": "#"}, {"not": {}}]}},
    {"json": {"type": "string", "pattern": "(a{1,999}){1,999}"}}, {"json": {"type": "number", "multipleOf": 1e-300}},
    {"json_object": "yes"}, {"whitespace_pattern": "(", "json": {}},
)
_CONTENT_TYPES = (
    b"text/plain", b"multipart/form-data", b"multipart/form-data; boundary=x", b"application/x-www-form-urlencoded",
    b"", b"application/json; charset=utf-16", b"application/octet-stream", b"\xff\xfe", b"/",
    b"application/" + b"x" * 5000,
)
_KEYS: tuple[dict[str, Any], ...] = (
    {"k" * 100_000: 1}, {f"k{number}": number for number in range(10_000)}, {"": 1}, {"\0": 1}, {"\ud800": 1},
    {"logit_bias": {"9" * 10_000: 1}}, {"logit_bias": {str(number): 1 for number in range(10_000)}},
    {"logit_bias": {"\ud800": 1}}, {"logit_bias": {"\u0661": 1}},
    {"stop": ["x"] * 10_000}, {"stop": "x" * 100_000}, {"stop_token_ids": list(range(10_000))},
    {"model": "x" * 100_000}, {"cache_salt": "\ud800" * 1000}, {"user": "x" * 100_000},
    {"allowed_token_ids": [0] * 10_000},
    {"bad_words": [""]}, {"bad_words": ["x"] * 10_000}, {"bad_words": ["x" * 100_000]}, {"bad_words": ["\ud800"]},
    {"chat_template_kwargs": {"messages": 1}},
)
_SCHEMAS: tuple[Any, ...] = (
    *(form["json"] for form in _FORMS if "json" in form), {}, [], 5, "x", None, {"type": "array"}, {"type": ["object"]},
    {"required": 5}, {"required": [[]]}, {"required": ["a"]}, {"properties": []}, {"properties": {"a": 5}},
    {"properties": {"\ud800": {}}}, {"properties": {"a": {"type": "string", "enum": [[], {}]}}}, {"$defs": 5},
    {"properties": {"a": {"type": "string", "pattern": "("}}}, {"additionalProperties": {"$ref": "#/$defs/x"}},
    {"properties": {str(number): {"type": "integer"} for number in range(2000)}}, {"x-guidance": 5},
)
_NAMES = ("f", "", "a b", "\0", "\ud800", "f" * 65, 5, None, [], "get_weather")
_CHOICES = (
    "auto", "none", "required", "any", 5, {}, {"type": "function"}, {"type": "function", "function": {"name": "f"}},
    {"type": "function", "name": "f"}, {"type": "tool", "name": "f"}, {"type": "any"}, {"type": "tool"}, [],
)
_CALLS: tuple[Any, ...] = (
    5, [5], [{}], [{"function": 5}], [{"function": {"name": 5}}], [{"function": {"name": "f", "arguments": 5}}],
    [{"function": {"name": "f", "arguments": "{"}}], [{"id": [], "function": {"name": "f", "arguments": "{}"}}],
    [{"function": {"name": "f"}}], {"a": 1}, [None],
)
_BLOCKS: tuple[Any, ...] = (
    {}, 5, {"type": []}, {"type": "image"}, {"type": "text"}, {"type": "tool_use"}, {"type": "tool_result"},
    {"type": "tool_use", "id": "a", "name": "f", "input": 5}, {"type": "thinking"}, {"type": "redacted_thinking"},
    {"type": "tool_use", "id": "a", "name": "f", "input": {}}, {"type": "tool_result", "tool_use_id": "a"},
    {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}, {"type": "text", "text": "\ud800"},
    {"type": "function_call"}, {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": []}, {"type": "reasoning", "content": 5},
    {"type": "reasoning", "summary": [5]}, {"type": "reasoning", "content": [{"text": "x"}]},
)
# fmt: on
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@dataclass(frozen=True)
class Malformed:
    """A malformed request: how it was corrupted, its target with the query, body and headers."""

    kind: str
    path: str
    target: str
    content: bytes
    headers: dict[bytes, bytes]


def malformed(seed: int) -> Iterator[Malformed]:
    """Yield requests indefinitely, for each path of `PATHS` in turn; deterministic by seed."""
    rng = random.Random(seed)
    while True:
        for path in PATHS:
            yield _spoilt(path, rng)


def _spoilt(path: str, rng: random.Random) -> Malformed:
    kind = rng.choice(tuple(_SPOIL))
    content = _SPOIL[kind](path, rng)
    headers = {b"content-type": b"application/json"}
    if rng.random() < 0.1:
        kind, headers = "content type", {b"content-type": rng.choice(_CONTENT_TYPES)}
        if rng.random() < 0.3:
            headers[b"content-encoding"] = rng.choice((b"gzip", b"br", b"x"))
    target = path
    if path == "/record":  # parameters are in the query; a valid one would start a recording
        seconds = rng.choice(("", "nan", "-1", "1e999", "0", "601", "x" * 5000, "\0", "\xe9", "1_", "0x1"))
        target += "?seconds=" + quote(seconds)
        target += rng.choice(("", "&replica=-1", "&replica=9", "&replica=", "&seconds=nan", "&" * 100))
    return Malformed(kind, path, target, content, headers)


def _with(path: str, **fields: Any) -> bytes:
    """Return a valid body with these fields."""
    return json.dumps({**_GOOD[path], **fields}).encode()


def _values(path: str, rng: random.Random) -> bytes:
    """Return a valid body with absurd values in some fields."""
    fields: dict[str, Any] = {}
    names = list(BODIES[path].model_fields) if path in BODIES else ["seconds", "replica"]
    for name in rng.sample(names, rng.randint(0, min(5, len(names)))):
        fields[name] = rng.choice(_VALUES)
        if name in _LIMITS and fields[name] is None:  # null would be valid, and slow
            fields[name] = -1
    return _with(path, **fields)


def _forms(path: str, rng: random.Random) -> bytes:
    form = rng.choice(_FORMS)
    if "json" in form and rng.random() < 0.3:
        asked = {"type": "json_schema", "name": "x", "schema": form["json"], "json_schema": {"schema": form["json"]}}
        return _with(path, response_format=asked, text={"format": asked})
    return _with(path, structured_outputs=form)


def _tools(path: str, rng: random.Random) -> bytes:
    """Return a body with tools, `tool_choice` and tool-call messages, some of them wrong."""

    def some(good: Any, wrong: Sequence[Any]) -> Any:
        return good if rng.random() < 0.7 else rng.choice(wrong)

    tools: list[Any] = []
    for number in range(rng.choice((0, 1, 1, 1, 2, 600))):
        schema = rng.choice(_SCHEMAS)
        function = {"name": some(f"f{number}", _NAMES), "strict": some(True, (False, 5))}
        if path == "/v1/messages" or path.endswith("count_tokens"):
            tools.append(some({"type": some("custom", ("function", 5)), **function, "input_schema": schema}, (5,)))
        elif path == "/v1/responses":
            kind = some("function", ("web_search", "custom", "namespace", []))
            inner = rng.choice((None, 5, [5], [{"type": "custom", "name": "f", "format": {"definition": [[]]}}]))
            tools.append({"type": kind, **function, "parameters": schema, "tools": inner, "format": inner})
        else:
            tools.append({"type": some("function", (5,)), "function": {**function, "parameters": schema}})
    fields: dict[str, Any] = {"tools": some(tools, ({}, "x")), "tool_choice": some(None, _CHOICES)}
    if path == "/v1/chat/completions" and rng.random() < 0.3:
        fields["tool_choice"] = "required"
    called = {"role": "assistant", "content": None, "tool_calls": rng.choice(_CALLS)}
    blocks = [rng.choice(_BLOCKS) for _ in range(rng.randint(1, 3))]
    turn = rng.choice((called, {"role": "tool", "content": "x", "tool_call_id": some("a", (5,))},
                       {"role": rng.choice(("assistant", "user")), "content": blocks}))  # fmt: skip
    turns = some(_CHAT, ([*_CHAT, turn], [*_CHAT, turn, *_CHAT]))
    fields |= {"messages": turns} if path != "/v1/responses" else {"input": some(turns, ([*_CHAT, *blocks], blocks))}
    if path == "/v1/messages":
        fields["thinking"] = some(None, ({"type": "enabled", "budget_tokens": 0}, {"type": "x"}, {"type": "disabled"}))
        fields["system"] = some(None, ("x", [5], blocks))
    return _with(path, **fields)


def _cut(path: str, rng: random.Random) -> bytes:
    content = _values(path, rng)
    return content[: rng.randrange(len(content))]


def _replaced(path: str, rng: random.Random) -> bytes:
    return _values(path, rng).replace(b'"', rng.choice((b"'", b"\xff", b"\0", b"{")), rng.randint(1, 3))


def _numbers(path: str, rng: random.Random) -> bytes:
    number = rng.choice((b"NaN", b"-Infinity", b"1e999", b"-1e-999", b"9" * 5000, b"0x1", b"01", b"1.", b"-", b"1e"))
    name = rng.choice(("max_tokens", "temperature", "top_p", "seed", "n", "logprobs", "tokens"))
    return _with(path, **{name: 12345}).replace(b"12345", number)


def _nested(path: str, rng: random.Random) -> bytes:
    depth = rng.choice((10, 100, 1000, 10_000, 100_000))
    if rng.random() < 0.3:
        return b"[" * depth
    pairs = ((b"[", b"]"), (b'{"a":', b"}"), (b'{"properties":{"a":', b"}}"), (b'[{"items":', b"}]"))
    opening, closing = rng.choice(pairs)
    whole = opening * depth + b"1" + closing * depth
    name = rng.choice(("prompt", "messages", "input", "tokens", "chat_template_kwargs", "logit_bias", "unknown"))
    if rng.random() < 0.3:
        name, whole = "structured_outputs", b'{"json":' + whole + b"}"
    return _with(path, **{name: 12345}).replace(b"12345", whole)


def _keys(path: str, rng: random.Random) -> bytes:
    content = _with(path, **rng.choice(_KEYS))
    if rng.random() < 0.2:  # each key twice
        content = content[:-1] + b", " * (len(content) > 2) + content[1:]
    return content


def _bytes(path: str, rng: random.Random) -> bytes:
    content = _values(path, rng)
    # fmt: off
    return rng.choice((
        b"", rng.randbytes(rng.randint(1, 2000)), b"\xef\xbb\xbf" + content, content.decode().encode("utf-16"),
        content.replace(b'"x"', b'"\xed\xa0\x80"'), content.replace(b'"x"', b'"\xc0\x80"'),
        content + content, b"\0" * 1000, b" " * 100_000, content[:1] + b"\xff" + content[1:],
        b"null", b"true", b'"x"', b"1", b"[]",
        b"prompt=x&max_tokens=2", b" " * ((1 << 20) + 1),
    ))
    # fmt: on


_SPOIL: dict[str, Callable[[str, random.Random], bytes]] = {
    "absurd values": _values,
    "structured outputs": _forms,
    "tools": _tools,
    "cut": _cut,
    "replaced": _replaced,
    "numbers": _numbers,
    "nested": _nested,
    "keys": _keys,
    "bytes": _bytes,
}


MOST_SECONDS = 5.0
_EACH = 20  # malformed requests of a client to a good one
_ANSWERED = {"prompt": "import os\n", "max_tokens": 4, "temperature": 0}
_TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}"


@dataclass
class Answers:
    """Answers received: counts and longest seconds by path and status, and violations."""

    counts: Counter[tuple[str, int]] = field(default_factory=Counter)
    slowest: dict[tuple[str, int], float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    good: int = 0

    def add(self, request: Malformed, status: int, seconds: float, text: str) -> None:
        key = request.path, status
        self.counts[key] += 1
        self.slowest[key] = max(self.slowest.get(key, 0.0), seconds)
        if status >= 500 or seconds > MOST_SECONDS:
            self.note(request, f"{status} after {seconds:.1f} s: {text[:300]}")

    def note(self, request: Malformed, text: str) -> None:
        self.wrong.append(f"{request.kind}, {request.target[:80]}, {request.content[:300]!r}: {text}")


async def client(server: Server, requests: Iterator[Malformed], expected: str, answers: Answers) -> None:
    """Send requests from the shared iterator, and a valid request after every `_EACH`."""
    async with httpx2.AsyncClient(base_url=server.url, timeout=4 * MOST_SECONDS) as http:
        for number, request in enumerate(requests, 1):
            began = time.monotonic()
            try:
                answer = await http.post(request.target, content=request.content, headers=request.headers)
                answers.add(request, answer.status_code, time.monotonic() - began, answer.text)
            except (httpx2.HTTPError, UnicodeError) as error:
                answers.note(request, f"{type(error).__name__}: {error}")
            if number % _EACH == 0:
                text = (await http.post("/v1/completions", json=_ANSWERED)).json()["choices"][0]["text"]
                answers.good += 1
                if text != expected:
                    answers.note(request, f"afterwards a good request got {text!r} instead of {expected!r}")


async def send(server: Server, count: int, clients: int, seed: int) -> Answers:
    answers = Answers()
    async with httpx2.AsyncClient(base_url=server.url, timeout=60) as http:
        expected = (await http.post("/v1/completions", json=_ANSWERED)).json()["choices"][0]["text"]
    requests = (request for request, _ in zip(malformed(seed), range(count), strict=False))
    await asyncio.gather(*(client(server, requests, expected, answers) for _ in range(clients)))
    return answers


def main() -> int:
    bench = Benchmark(__doc__, requests=10_000, clients=4, seed=0, overrides=True)
    given = bench.given
    with scratch() as folder:
        model = folder / "model"
        shutil.copytree(Path(gapless.models.__path__[0]) / "shipped", model)
        (model / "chat_template.jinja").write_text(_TEMPLATE)
        with gapless_server([f"model={model} serve.max_body_mib=1", *given.overrides]) as server:
            began = time.monotonic()
            answers = asyncio.run(send(server, given.requests, given.clients, given.seed))
            seconds = time.monotonic() - began
            time.sleep(1.0)
            left = server.left()
    for path, status in sorted(answers.counts, key=lambda key: (PATHS.index(key[0]), key[1])):
        counted = {"requests": answers.counts[path, status], "slowest_s": answers.slowest[path, status]}
        bench.row("answers", path=path, status=status, **counted)
    answered, wrong = answers.counts.total(), len(answers.wrong)
    totals = {"requests": given.requests, "answered": answered, "good": answers.good, "seconds": seconds}
    bench.row("totals", **totals, left=left, wrong=wrong)
    say(*answers.wrong[:20])
    return bench.end(answered == given.requests and not wrong and not left)


if __name__ == "__main__":
    sys.exit(main())
