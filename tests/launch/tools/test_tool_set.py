"""Which tools a request offers, what is refused of them by its place, and the ids of their calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gapless.launch.server.errors import ApiError
from gapless.launch.server.tools.dialect import Dialect
from gapless.launch.server.tools.tool_set import Function, ToolSet, tool_set
from gapless.models.chat_template import ChatTemplate
from gapless.models.tokenizer import load_tokenizer
from tests.support.scripted import write_tokenizer


def offered(*names: str, **fields: Any) -> dict[str, Function]:
    return {f"tools[{place}]": Function(name, **fields) for place, name in enumerate(names)}


@pytest.mark.parametrize(
    ("choice", "named", "wanted", "callable_"),
    [
        (None, None, "auto", ["a", "b"]),
        ("auto", None, "auto", ["a", "b"]),
        ("required", None, "required", ["a", "b"]),
        (None, "b", "required", ["b"]),
        ("required", "a", "required", ["a"]),
    ],
)
def test_a_choice_says_what_may_be_called(choice: Any, named: str | None, wanted: str, callable_: list[str]) -> None:
    for is_parallel in (True, False):
        found = tool_set(offered("a", "b"), choice, named, is_parallel)
        assert found is not None
        assert (found.choice, found.is_parallel) == (wanted, is_parallel)
        assert [each.name for each in found.callable] == [*found.schemas] == callable_
        assert [each.name for each in found.functions] == ["a", "b"]  # the template is told of all
        assert found.has_grammar == (wanted == "required")


def test_a_strict_tool_makes_calls_follow_their_schemas() -> None:
    found = tool_set(offered("a") | {"tools[1]": Function("b", strict=True)}, None)
    assert found is not None
    assert (found.choice, found.has_grammar) == ("auto", True)


@pytest.mark.parametrize(("choice", "tools"), [("none", offered("a")), (None, {}), ("auto", {})])
def test_no_tools_are_none(choice: Any, tools: dict[str, Function]) -> None:
    assert tool_set(tools, choice) is None


@pytest.mark.parametrize(
    ("tools", "choice", "named", "param"),
    [
        (offered("a", "b", "a"), None, None, "tools[2].name"),
        (offered("a b"), None, None, "tools[0].name"),
        (offered("a", ""), None, None, "tools[1].name"),
        (offered("x" * 65), None, None, "tools[0].name"),
        (offered("é"), "none", None, "tools[0].name"),
        (offered("a", parameters={"type": "array"}), None, None, "tools[0]"),
        (offered(*(f"f{number}" for number in range(513))), None, None, "tools"),
        (offered("a"), None, "b", "tool_choice"),
        ({}, "required", None, "tool_choice"),
    ],
)
def test_what_is_wrong_is_named_by_its_place(
    tools: dict[str, Function], choice: Any, named: str | None, param: str
) -> None:
    with pytest.raises(ApiError) as wrong:
        tool_set(tools, choice, named)
    assert (wrong.value.status, wrong.value.param) == (400, param)


def test_as_many_tools_and_as_long_names_as_are_allowed() -> None:
    found = tool_set(offered("x" * 64, *(f"f{number}" for number in range(511))), None)
    assert found is not None
    assert len(found.functions) == 512


@pytest.mark.parametrize(("name", "length"), [("hermes", 29), ("mistral", 9), ("mistral_v11", 9)])
def test_each_call_of_an_answer_has_an_id_of_its_own_that_stays(tmp_path: Path, name: str, length: int) -> None:
    write_tokenizer(tmp_path, ["[TOOL_CALLS]", "[ARGS]"])
    dialect = Dialect(ChatTemplate("", {}), load_tokenizer(tmp_path, 600), name)
    speech = dialect.speech("prompt", ToolSet([Function("f")]))
    assert speech is not None
    places = [(answer, output, call) for answer in ("x", "y") for output in range(3) for call in range(12)]
    ids = [speech.call_id(*place, "") for place in places]
    assert len(set(ids)) == len(places)
    assert {len(each) for each in ids} == {length}
    assert ids == [speech.call_id(*place, "") for place in places]
    assert speech.call_id("x", 0, 0, "functions.f:0") == "functions.f:0"
