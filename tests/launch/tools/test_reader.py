"""What models write is read the same however it is cut: reasoning, text, calls."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.launch.server.tools.formats import FORMATS, REASONING, ToolFormat, tool_format
from gapless.launch.server.tools.reader import Arguments, Called, Part, Reader, Reasoned, Said
from tests.support.tool_outputs import OUTPUTS, TOOLS, Output

each_output = pytest.mark.parametrize("output", OUTPUTS, ids=[each.id for each in OUTPUTS])


def reader_of(output: Output, **options: Any) -> Reader:
    return Reader(
        tool_format("", output.format), REASONING[0], tools=TOOLS, in_reasoning=output.in_reasoning, **options
    )


def joined(parts: Iterable[Part]) -> tuple[str, str, list[list[str]]]:
    text, reasoning, calls = "", "", []
    for part in parts:
        if isinstance(part, Said):
            assert part.text
            text += part.text
        elif isinstance(part, Reasoned):
            reasoning += part.text
        elif isinstance(part, Called):
            assert part.index == len(calls)
            calls.append([part.name, ""])
        else:
            assert isinstance(part, Arguments)
            assert part.index == len(calls) - 1
            calls[-1][1] += part.text
    return text, reasoning, calls


def read(output: Output, pieces: Sequence[str], **options: Any) -> tuple[str, str, list[list[str]]]:
    reader = reader_of(output, **options)
    parts = [part for piece in pieces for part in reader.push(piece)]
    return joined(parts + reader.finish())


@each_output
def test_an_output_is_read_whole(output: Output) -> None:
    text, reasoning, calls = read(output, [output.raw])
    assert (text, reasoning) == (output.text, output.reasoning)
    assert [(name, json.loads(arguments)) for name, arguments in calls] == output.calls


@each_output
def test_a_cut_at_any_place_changes_nothing(output: Output) -> None:
    whole = read(output, [output.raw])
    for place in range(len(output.raw) + 1):
        assert read(output, [output.raw[:place], output.raw[place:]]) == whole, (output.raw[:place], output.raw[place:])
    assert read(output, list(output.raw)) == whole
    rng = random.Random(0)
    for _ in range(50):
        places = sorted(rng.choices(range(len(output.raw) + 1), k=6))
        pieces = [output.raw[a:b] for a, b in zip([0, *places], [*places, None], strict=True)]
        assert read(output, pieces) == whole, pieces


@each_output
def test_what_breaks_off_is_read_the_same_however_it_was_cut(output: Output) -> None:
    for place in range(len(output.raw)):
        assert read(output, [output.raw[:place]]) == read(output, list(output.raw[:place])), output.raw[:place]


WORDS = sorted({text for each in FORMATS for text in each.texts if text} | {"<think>", "</think>"})
PIECES = st.sampled_from([*WORDS, "{", "}", '"', "\n", " ", "a", '{"name": "now"', ', "arguments": ', "now", ":", "\\"])


@given(st.sampled_from(FORMATS), st.lists(PIECES, max_size=25), st.booleans())
def test_any_text_is_read_the_same_however_it_is_cut(format: ToolFormat, words: list[str], in_reasoning: bool) -> None:
    raw = "".join(words)
    output = Output("", format.name, raw, in_reasoning=in_reasoning)
    assert read(output, words) == read(output, [raw]) == read(output, list(raw))


@each_output
def test_without_tools_a_call_is_text(output: Output) -> None:
    if output.format == "harmony":
        return
    reader = Reader(None, None)
    assert joined(reader.push(output.raw) + reader.finish()) == (output.raw, "", [])


def test_later_calls_than_were_asked_for_are_dropped() -> None:
    output = next(each for each in OUTPUTS if each.id == "hermes")
    _, _, calls = read(output, list(output.raw), most_calls=1)
    assert [name for name, _ in calls] == ["get_weather"]


def test_arguments_come_while_they_are_written() -> None:
    output = next(each for each in OUTPUTS if each.id == "hermes")
    reader = reader_of(output)
    place = output.raw.index("Par") + 3
    assert joined(reader.push(output.raw[:place])) == ("Let me see.", "", [["get_weather", '{"city": "Par']])


def test_an_answer_in_json_comes_while_it_is_written() -> None:
    """Where nothing but a brace tells a call, the first key that no call has tells that it is none."""
    reader = reader_of(Output("", "json", ""))
    assert joined(reader.push('{"answer": [1, ')) == ('{"answer": [1,', "", [])
    assert joined(reader.push("2]}") + reader.finish()) == (" 2]}", "", [])


CODE = "    if x:\n\ty\n\n  z  "


@pytest.mark.parametrize("name", ["glm45", "qwen3_coder"])
@pytest.mark.parametrize(
    ("written", "kind", "value"),
    [
        ("null", ["string", "null"], None),
        ("null", "string", "null"),
        ("null", ["integer", "null"], None),
        ("12", "string", "12"),
        ("12", "integer", 12),
        ("12", None, 12),
        ("true", "boolean", True),
        ('{"a": "é"}', "object", {"a": "é"}),
        ("twelve", "integer", "twelve"),
        ("", "string", ""),
        (CODE, "string", CODE),
    ],
)
def test_values_without_quotes_are_of_the_type_that_the_schema_says(
    name: str, written: str, kind: Any, value: Any
) -> None:
    format = tool_format("", name)
    begin, key_end, before, behind = format.pairs
    raw = f"{format.call}f{format.name_end}{begin}a{key_end}{before}{written}{behind}{format.call_end}"
    schema = {"type": "object", "properties": {"a": {} if kind is None else {"type": kind}}}
    reader = Reader(format, None, tools={"f": schema})
    text, _, calls = joined([part for char in raw for part in reader.push(char)] + reader.finish())
    assert (text, [(called, json.loads(arguments)) for called, arguments in calls]) == ("", [("f", {"a": value})])


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{% for t in tools %}<tool_call>{% endfor %}", "hermes"),
        ("<|python_tag|>", "llama3"),
        ("[TOOL_CALLS]", "mistral"),
        ("[TOOL_CALLS][ARGS]", "mistral_v11"),
        ("<tool_call>{name}<arg_key>", "glm45"),
        ("<tool_call><function=x><parameter=y>", "qwen3_coder"),
        ("<|start|><|channel|>", "harmony"),
        ("{{ messages }}", "json"),
    ],
)
def test_a_template_tells_the_format(source: str, name: str) -> None:
    assert tool_format(source, None).name == name
