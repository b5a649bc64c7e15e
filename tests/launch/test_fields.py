"""Fields of requests: each is computed, ignored or refused, as docs/serve.md says; null is as absent."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params

from gapless.launch.server.errors import ApiError
from gapless.launch.server.fields import IGNORED, REFUSED, check_fields
from gapless.launch.server.messages_input import MessagesBody
from gapless.launch.server.read_body import decode, validated
from gapless.launch.server.requests import (
    ChatBody,
    CompletionBody,
    ResponseBody,
    SamplingBody,
    each_output,
)

PAGE = Path(__file__).parents[2] / "docs/serve.md"
LEAST: dict[type[SamplingBody], dict[str, Any]] = {
    CompletionBody: {"prompt": "x"},
    ChatBody: {"messages": [{"role": "user", "content": "x"}]},
    ResponseBody: {"input": "x"},
    MessagesBody: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
}
NAMES = {CompletionBody: "completions", ChatBody: "chats", ResponseBody: "responses", MessagesBody: "messages"}


def rows() -> list[str]:
    """Make the rows of the page's table."""
    paths_of: dict[str, list[str]] = defaultdict(list)
    for kind, name in NAMES.items():
        for field in kind.computed():
            paths_of[field].append(name)
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for field, paths in paths_of.items():
        groups["computed", ", ".join(paths)].append(field)
    for why, fields in IGNORED.items():
        groups["ignored", why] += fields
    for field, refusal in REFUSED.items():
        groups["refused", refusal.text].append(field)
    order = ("computed", "ignored", "refused")
    named = {key: ", ".join(f"`{field}`" for field in sorted(fields)) for key, fields in groups.items()}
    return [f"| {named[key]} | {': '.join(key)} |" for key in sorted(named, key=lambda key: (order.index(key[0]), key))]


def test_the_page_has_the_table() -> None:
    text = PAGE.read_text()
    assert [row for row in rows() if row not in text] == []


@pytest.mark.parametrize("kind", NAMES, ids=NAMES.values())
def test_null_is_as_absent(kind: type[SamplingBody]) -> None:
    optional = {
        name: None for name in (*kind.computed(), *REFUSED, *sum(IGNORED.values(), ())) if name not in LEAST[kind]
    }
    assert check_fields(kind.computed(), LEAST[kind] | optional) == []
    assert validated(kind, LEAST[kind] | optional) == validated(kind, LEAST[kind])
    stream = {"stream": True, "stream_options": {"include_usage": None}}
    assert validated(kind, LEAST[kind] | stream).stream_options is not None


@pytest.mark.parametrize(
    ("kind", "given", "is_refused"),
    [
        (ChatBody, {"tools": []}, False),
        (CompletionBody, {"tools": [{"type": "function"}]}, True),
        (ChatBody, {"functions": [{"name": "f"}]}, True),
        (ChatBody, {"store": True}, True),
        (ChatBody, {"store": False}, False),
        (ResponseBody, {"previous_response_id": "resp_1"}, True),
        (MessagesBody, {"stop": ["x"]}, True),
        (MessagesBody, {"mcp_servers": [{"url": "x"}]}, True),
        (ChatBody, {"web_search_options": {}}, True),
        (ChatBody, {"vllm_xargs": {}}, False),
        (CompletionBody, {"tool_choice": "none"}, False),
        (CompletionBody, {"tool_choice": "required"}, True),
        (ChatBody, {"function_call": {"name": "f"}}, True),
        (ChatBody, {"use_beam_search": False}, False),
        (ChatBody, {"use_beam_search": True}, True),
        (CompletionBody, {"best_of": 1}, False),
        (CompletionBody, {"best_of": 2, "n": 2}, False),
        (CompletionBody, {"best_of": 2}, True),
        (ChatBody, {"modalities": ["text"]}, False),
        (ChatBody, {"modalities": ["text", "audio"]}, True),
        (ChatBody, {"echo": True}, True),
        (ChatBody, {"instructions": "be kind"}, True),
        (ChatBody, {"text": {"format": {"type": "json_object"}}}, True),
        (ChatBody, {"text": {}}, False),
        (CompletionBody, {"top_logprobs": 2}, True),
        (CompletionBody, {"reasoning_effort": "low"}, False),
        (ResponseBody, {"messages": [{"role": "user", "content": "x"}]}, True),
        (CompletionBody, {"echo": True}, False),
        (ResponseBody, {"response_format": {"type": "text"}}, True),
        (ResponseBody, {"max_tokens": 5}, True),
        (ResponseBody, {"n": 2}, True),
        (CompletionBody, {"guided_regex": "a"}, False),
        (CompletionBody, {"metadata": {"a": "b"}, "service_tier": "flex"}, False),
    ],
)
def test_a_field_is_refused_only_where_it_asks_for_something(
    kind: type[SamplingBody], given: dict[str, Any], is_refused: bool
) -> None:
    if not is_refused:
        assert check_fields(kind.computed(), given) == []
        return
    with pytest.raises(ApiError) as refused:
        check_fields(kind.computed(), given)
    (name, *_) = given
    assert refused.value.status == 400
    assert refused.value.param == name
    assert refused.value.message.startswith(f"{name}: ")


@pytest.mark.parametrize("kind", NAMES, ids=NAMES.values())
def test_no_field_of_one_path_is_unknown_on_another(kind: type[SamplingBody]) -> None:
    """Nothing that changes an output elsewhere is dropped in silence."""
    fields = {name for other in NAMES for name in other.computed()} - kind.computed()
    assert fields <= {*REFUSED, *sum(IGNORED.values(), ())}


def test_unknown_fields_are_named_as_a_header_can_hold_them() -> None:
    assert check_fields(CompletionBody.computed(), {"temprature": 1, "a\r\nb": 1, "é": 1}) == ["temprature", "?", "?"]


@pytest.mark.parametrize(
    ("kind", "given", "param"),
    [
        (CompletionBody, {}, "prompt"),
        (CompletionBody, {"prompt": ["a", 5]}, "prompt[1]"),
        (CompletionBody, {"prompt": "x", "stop": ["a", 5]}, "stop[1]"),
        (CompletionBody, {"prompt": "x", "n": 1.5}, "n"),
        (CompletionBody, {"prompt": "x", "response_format": {"type": "yaml"}}, "response_format.type"),
        (ChatBody, {"messages": [{"role": "user"}, 5]}, "messages[1]"),
        (ChatBody, {"messages": "x"}, "messages"),
        (ResponseBody, {"input": 5}, "input"),
        (CompletionBody, {"prompt": "x", "stream_options": []}, "stream_options"),
    ],
)
def test_an_error_names_the_place_in_the_body(kind: type[SamplingBody], given: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as wrong:
        validated(kind, given)
    assert wrong.value.param == param
    assert wrong.value.message.startswith(f"{param}: ")
    assert "dictionary" not in wrong.value.message


def test_a_number_without_a_fraction_is_an_integer() -> None:
    body = validated(CompletionBody, {"prompt": "x", "n": 2.0, "max_tokens": 3.0, "temperature": 1.0})
    assert (body.n, body.max_tokens, body.temperature) == (2, 3, 1.0)


@pytest.mark.parametrize(
    ("given", "seeds"),
    [
        ({}, [None, None]),
        ({"seed": -1, "top_k": -1}, [None, None]),
        ({"seed": -2}, [-2, -1]),
        ({"seed": (1 << 63) - 1}, [(1 << 63) - 1, -(1 << 63)]),
        ({"seed": -(1 << 63)}, [-(1 << 63), 1 - (1 << 63)]),
    ],
)
def test_each_output_has_a_seed_of_its_own(given: dict[str, Any], seeds: list[int | None]) -> None:
    """-1 is none, and all tokens for `top_k`, as in vLLM. Behind the highest seed of 64 bits comes the lowest."""
    params = validated(CompletionBody, {"prompt": "x", "n": 2, **given}).sampling(1, None)
    assert [each.seed for each in each_output(params, 2)] == seeds
    assert params.top_k == 0


HALF = "\\ud83d"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b'\xef\xbb\xbf"x"', "x"),
        ('"é"'.encode("utf-16"), "é"),
        ('"é"'.encode("utf-32-le"), "é"),
        (rf'"a{HALF}"'.encode(), "a\ufffd"),
        (rf'"{HALF}{HALF}\ude00\ude00"'.encode(), "\ufffd\U0001f600\ufffd"),
        (rf'"\\{HALF}"'.encode(), "\\\ufffd"),
        (rf'"\{HALF}"'.encode(), "\\ud83d"),
        (b'"\xed\xa0\xbd"', "\ufffd"),
    ],
)
def test_json_as_others_write_it(content: bytes, text: str) -> None:
    assert decode(content) == text


@pytest.mark.parametrize("content", [b"", b"{", b'"\xe9"', b"NaN", b'{"a": "\\ud83d"', b"[" * 100_000])
def test_what_is_no_json_is_said(content: bytes) -> None:
    with pytest.raises(ApiError, match="not JSON"):
        decode(content)


def published(kind: str) -> set[str]:
    """Return the fields that a path has by the schema of its own client."""
    if kind == "messages":
        params = pytest.importorskip("anthropic.types.message_create_params")
        return set(get_type_hints(params.MessageCreateParamsBase)) | {"stream"}
    if kind == "chats":
        return set(get_type_hints(chat_params.CompletionCreateParamsBase)) | {"stream"}
    if kind == "completions":
        return set(get_type_hints(completion_params.CompletionCreateParamsBase)) | {"stream"}
    return set(get_type_hints(response_params.ResponseCreateParamsBase)) | {"stream"}


@pytest.mark.parametrize("kind", NAMES, ids=NAMES.values())
def test_no_published_field_is_unknown(kind: type[SamplingBody]) -> None:
    known = kind.computed() | {*REFUSED, *sum(IGNORED.values(), ())}
    assert published(NAMES[kind]) - known == set()


@pytest.mark.parametrize("given", [{"stop_token_ids": [1.0]}, {"prompt": [1.0, 2]}, {"prompt": [[1.0], [2]]}])
def test_numbers_without_a_fraction_are_integers_in_lists_too(given: dict[str, Any]) -> None:
    (name, value), *_ = given.items()
    assert getattr(validated(CompletionBody, {"prompt": "x"} | given), name) == value
    with pytest.raises(ApiError):
        validated(CompletionBody, {"prompt": "x"} | {name: [1.5]})
