"""Requests that a server must refuse, or else take as they are: malformed bodies for each path that takes one."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from gapless.launch.server.requests import ChatBody, CompletionBody, DetokenizeBody, ResponseBody, TokenizeBody

BODIES = {
    "/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody, "/v1/responses": ResponseBody,
    "/tokenize": TokenizeBody, "/detokenize": DetokenizeBody,
}  # fmt: skip
PATHS = (*BODIES, "/record")
_CHAT = [{"role": "user", "content": "x"}]
_GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/chat/completions": {"messages": _CHAT, "max_tokens": 2, "max_completion_tokens": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
    "/record": {},
}
_VALUES = (
    None, True, 0, -1, 2**31, 2**64, 10**40, 10**4000, 1.5, 1e308, -0.0, "", "x", "\0", "\ud800", "\udc00\ud800", [],
    [[]], [1], ["a", 1], {}, {"a": 1}, {"\ud800": 1}, [None], [[1, 2], [3]], [-5], [2**31], [True], ["\ud800"], [""],
    "a" * 5000, [_CHAT], {"role": "user"}, [{"role": "\0", "content": [{"type": "text", "text": None}]}],
    [{"role": "user", "content": "x", "tool_calls": [{"function": {}}]}],
)  # fmt: skip
_FORMS: tuple[dict[str, Any], ...] = (
    {"regex": "((((a{1,1000}){1,1000}){1,1000}){1,1000})"}, {"regex": "(a|aa|aaa)*" * 500}, {"regex": "(" * 5000},
    {"regex": "\0"}, {"regex": "[\ud800]"}, {"grammar": "start: start"}, {"grammar": "start: /" + "a?" * 5000 + "/"},
    {"grammar": "\0" * 100}, {"choice": []}, {"choice": ["a" * 5000] * 20}, {"choice": [1]}, {"json": "{"},
    {"json": {"$ref": "#"}}, {"json": {"$ref": "http://localhost/schema"}},
    {"json": {"type": "array", "minItems": 10**9}},
    {"json": {"type": "string", "minLength": 2**40}}, {"json": {"enum": [[]] * 2000}}, {"json": False},
    {"json": {"allOf": [{"$ref": "#"}, {"not": {}}]}}, {"json": {"type": "string", "pattern": "(a{1,999}){1,999}"}},
    {"json": {"type": "number", "multipleOf": 1e-300}}, {"json_object": "yes"}, {"whitespace_pattern": "(", "json": {}},
)  # fmt: skip
_CONTENT_TYPES = (
    b"text/plain", b"multipart/form-data", b"multipart/form-data; boundary=x", b"application/x-www-form-urlencoded",
    b"", b"application/json; charset=utf-16", b"application/octet-stream", b"\xff\xfe", b"/",
    b"application/" + b"x" * 5000,
)  # fmt: skip
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@dataclass(frozen=True)
class Malformed:
    """A request: how it was spoilt, its target with the query, and what comes after."""

    kind: str
    path: str
    target: str
    content: bytes
    headers: dict[bytes, bytes]


def malformed(seed: int) -> Iterator[Malformed]:
    """Yield requests without end, for each path of `PATHS` in turn. The same seed gives the same ones."""
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
    if path == "/record":  # its parameters stand in the query; no good one may follow, as that would record
        seconds = rng.choice(("", "nan", "-1", "1e999", "0", "601", "x" * 5000, "\0", "\xe9", "1_", "0x1"))
        target += "?seconds=" + quote(seconds)
        target += rng.choice(("", "&replica=-1", "&replica=9", "&replica=", "&seconds=nan", "&" * 100))
    return Malformed(kind, path, target, content, headers)


def _body(path: str, rng: random.Random) -> dict[str, Any]:
    """Return a good body with absurd values in some fields."""
    body = dict(_GOOD[path])
    names = list(BODIES[path].model_fields) if path in BODIES else ["seconds", "replica"]
    for name in rng.sample(names, rng.randint(0, min(5, len(names)))):
        body[name] = rng.choice(_VALUES)
        if name in _LIMITS and body[name] is None:  # that would be good, and long
            body[name] = -1
    return body


def _encoded(path: str, rng: random.Random) -> bytes:
    return json.dumps(_body(path, rng)).encode()


def _forms(path: str, rng: random.Random) -> bytes:
    form = rng.choice(_FORMS)
    if "json" in form and rng.random() < 0.3:
        asked = {"type": "json_schema", "name": "x", "schema": form["json"], "json_schema": {"schema": form["json"]}}
        return json.dumps({**_GOOD[path], "response_format": asked, "text": {"format": asked}}).encode()
    return json.dumps({**_GOOD[path], "structured_outputs": form}).encode()


def _cut(path: str, rng: random.Random) -> bytes:
    content = _encoded(path, rng)
    return content[: rng.randrange(len(content))]


def _replaced(path: str, rng: random.Random) -> bytes:
    return _encoded(path, rng).replace(b'"', rng.choice((b"'", b"\xff", b"\0", b"{")), rng.randint(1, 3))


def _numbers(path: str, rng: random.Random) -> bytes:
    number = rng.choice((b"NaN", b"-Infinity", b"1e999", b"-1e-999", b"9" * 5000, b"0x1", b"01", b"1.", b"-", b"1e"))
    name = rng.choice(("max_tokens", "temperature", "top_p", "seed", "n", "logprobs", "tokens"))
    return json.dumps({**_GOOD[path], name: 12345}).encode().replace(b"12345", number)


def _nested(path: str, rng: random.Random) -> bytes:
    depth = rng.choice((10, 100, 1000, 10_000, 100_000))
    if rng.random() < 0.3:
        return b"[" * depth
    opening, closing = rng.choice((
        (b"[", b"]"), (b'{"a":', b"}"), (b'{"properties":{"a":', b"}}"), (b'[{"items":', b"}]"),
    ))  # fmt: skip
    whole = opening * depth + b"1" + closing * depth
    name = rng.choice(("prompt", "messages", "input", "tokens", "chat_template_kwargs", "logit_bias", "unknown"))
    if rng.random() < 0.3:
        name, whole = "structured_outputs", b'{"json":' + whole + b"}"
    return json.dumps({**_GOOD[path], name: 12345}).encode().replace(b"12345", whole)


def _keys(path: str, rng: random.Random) -> bytes:
    kinds: tuple[dict[str, Any], ...] = (
        {"k" * 100_000: 1}, {f"k{number}": number for number in range(10_000)}, {"": 1}, {"\0": 1}, {"\ud800": 1},
        {"logit_bias": {"9" * 10_000: 1}}, {"logit_bias": {str(number): 1 for number in range(10_000)}},
        {"logit_bias": {"\ud800": 1}}, {"logit_bias": {"\u0661": 1}}, {"stop": ["x"] * 10_000}, {"stop": "x" * 100_000},
        {"stop_token_ids": list(range(10_000))}, {"model": "x" * 100_000}, {"cache_salt": "\ud800" * 1000},
        {"user": "x" * 100_000}, {"allowed_token_ids": [0] * 10_000}, {"bad_words": [""]},
        {"bad_words": ["x"] * 10_000}, {"bad_words": ["x" * 100_000]}, {"bad_words": ["\ud800"]},
        {"chat_template_kwargs": {"messages": 1}},
    )  # fmt: skip
    content = json.dumps({**_GOOD[path], **rng.choice(kinds)})
    if rng.random() < 0.2:  # each key twice
        content = content[:-1] + ", " * (len(content) > 2) + content[1:]
    return content.encode()


def _bytes(path: str, rng: random.Random) -> bytes:
    content = _encoded(path, rng)
    return rng.choice((
        b"", rng.randbytes(rng.randint(1, 2000)), b"\xef\xbb\xbf" + content, content.decode().encode("utf-16"),
        content.replace(b"x", b"\xed\xa0\x80"), content.replace(b"x", b"\xc0\x80"), content + content, b"\0" * 1000,
        b" " * 100_000, content[:1] + b"\xff" + content[1:], b"null", b"true", b'"x"', b"1", b"[]",
        b"prompt=x&max_tokens=2", b" " * ((1 << 20) + 1),
    ))  # fmt: skip


_SPOIL: dict[str, Callable[[str, random.Random], bytes]] = {
    "absurd values": _encoded, "structured outputs": _forms, "cut": _cut, "replaced": _replaced, "numbers": _numbers,
    "nested": _nested, "keys": _keys, "bytes": _bytes,
}  # fmt: skip
