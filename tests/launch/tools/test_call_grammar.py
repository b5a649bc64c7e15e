# ruff: noqa: RUF001
"""What a grammar of calls allows is read as calls of tools that are there, with arguments that follow their schemas."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from gapless.conf.errors import ConfigError
from gapless.conf.sampling import SamplingParams
from gapless.conf.serving import ToolFormatName
from gapless.conf.structured_outputs import StructuredOutputs
from gapless.launch.server.tools.dialect import Dialect, Speech
from gapless.launch.server.tools.formats import FORMATS, NAMES, tool_format
from gapless.launch.server.tools.reader import Arguments, Called, Part, Reasoned, Said
from gapless.launch.server.tools.tool_set import Function, ToolSet
from gapless.models.chat_template import ChatTemplate
from gapless.models.grammar import Grammars
from gapless.models.tokenizer import Detokenizer, Tokenizer, load_tokenizer
from tests.support.scripted import write_tokenizer

END = "<|end_of_text|>"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "unit": {"type": "string", "enum": ["°C", 'a "b"']},
        "days": {"type": "integer", "minimum": -3, "maximum": 40},
        "at": {"$ref": "#/$defs/at"},
    },
    "required": ["unit"],
    "additionalProperties": False,
    "$defs": {"at": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"],
                     "additionalProperties": False}},
}  # fmt: skip
EMPTY: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTIONS = [Function("get.weather-2", "d", SCHEMA), Function("now", None, EMPTY)]
FORM: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"enum": ["now", "Ada"]}, "arguments": {"type": "object", "maxProperties": 0.0}},
    "required": ["name"],
    "additionalProperties": False,
}
V = 600
of_each_format = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Make one that has the texts of all formats as special tokens, but those that models have as plain ones."""
    texts = {
        text.strip() for each in FORMATS for text in each.texts if text.strip()[:1] in ("<", "[") and " " not in text
    }
    special = sorted(text for text in texts if text.count("<") < 2 and ("|" in text or "｜" in text or "[T" in text))
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, [END, "[ARGS]", *special])
    return load_tokenizer(folder, V)


def dialect_of(tokenizer: Tokenizer, name: str) -> Dialect:
    return Dialect(ChatTemplate("{{ tools }}", {}), tokenizer, name)


def sampled(tokenizer: Tokenizer, speech: Speech) -> SamplingParams:
    """Return the sampling parameters of a request, with the grammar that the compiler's process would write."""
    task = speech.grammar(None)
    wanted = speech.form if task is None else task(Grammars(tokenizer, V, tokenizer.eos_token_ids))
    return speech.params(SamplingParams(structured_outputs=speech.form), wanted)


def drawn(tokenizer: Tokenizer, params: SamplingParams, rng: random.Random, begin: str = "", prefix: str = "") -> str:
    """Return a text that the structured outputs allow, drawn at random, as a client's reader gets it."""
    assert params.structured_outputs is not None
    matcher = Grammars(tokenizer, V, tokenizer.eos_token_ids).matcher(params.structured_outputs)
    tokens = tokenizer.encode(prefix, add_special=False)
    assert matcher.consume_tokens(tokens)
    while not matcher.is_stopped():
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"))
        token = int(rng.choice(allowed.tolist()))
        ends = [each for each in allowed.tolist() if each in tokenizer.encode('"}', add_special=False)]
        if ends and rng.random() < 0.3:
            token = rng.choice(ends)
        if set(tokenizer.eos_token_ids) & set(allowed.tolist()):  # else it may go on with calls for long
            token = tokenizer.eos_token_ids[0]
        tokens.append(token)
        assert matcher.consume_token(token), matcher.get_error()
        assert len(tokens) < 2000
    detokenizer = Detokenizer(tokenizer, shown=params.shown_special_ids)
    return begin + "".join(map(detokenizer.push, tokens)) + detokenizer.flush()


def check(parts: list[Part]) -> tuple[str, list[str]]:
    """Check the calls of an output; return its text, and the names that are called."""
    names = [part.name for part in parts if isinstance(part, Called)]
    for index, name in enumerate(names):
        text = "".join(part.text for part in parts if isinstance(part, Arguments) and part.index == index)
        jsonschema.validate(json.loads(text), SCHEMA if name == FUNCTIONS[0].name else EMPTY)
    return "".join(part.text for part in parts if isinstance(part, Said)), names


@of_each_format
@pytest.mark.parametrize("is_parallel", [True, False], ids=["parallel", "one"])
def test_forced_calls(tokenizer: Tokenizer, name: str, is_parallel: bool) -> None:
    tools = ToolSet(FUNCTIONS, "required", is_parallel=is_parallel)
    speech = dialect_of(tokenizer, name).speech("prompt", tools)
    assert speech is not None
    params, rng, called = sampled(tokenizer, speech), random.Random(0), []
    for _ in range(12):
        text = drawn(tokenizer, params, rng)
        reader = speech.reader()
        said, names = check([*(part for char in text for part in reader.push(char)), *reader.finish()])
        assert said == "", text
        assert names, text
        called += names
    assert set(called) == {each.name for each in FUNCTIONS}


@of_each_format
def test_a_named_call(tokenizer: Tokenizer, name: str) -> None:
    speech = dialect_of(tokenizer, name).speech("prompt", ToolSet(FUNCTIONS, "required", "now", False))
    assert speech is not None
    reader = speech.reader()
    text = drawn(tokenizer, sampled(tokenizer, speech), random.Random(1))
    assert check([*reader.push(text), *reader.finish()]) == ("", ["now"])


@of_each_format
def test_a_strict_call_is_bound_from_its_first_words_on(tokenizer: Tokenizer, name: str) -> None:
    functions = [Function(each.name, None, each.parameters, strict=True) for each in FUNCTIONS]
    speech = dialect_of(tokenizer, name).speech("prompt", ToolSet(functions))
    assert speech is not None
    params, rng = sampled(tokenizer, speech), random.Random(0)
    assert params.structured_outputs is not None
    after = params.structured_outputs.after
    format = tool_format("", name)
    assert after in (*format.opens, '{"name": ')
    before = "" if format.is_bare else "Let me see. "
    for _ in range(5):
        reader = speech.reader()
        text = drawn(tokenizer, params, rng, before + after)
        said, names = check([*reader.push(text), *reader.finish()])
        assert (said, bool(names)) == (before.strip(), True), text


FORMS = [
    StructuredOutputs(json=FORM),
    StructuredOutputs(json_object=True),
    StructuredOutputs(choice=("yes", "<no>")),
    StructuredOutputs(regex="[a-c]/{1,3}"),
    StructuredOutputs(grammar='start: "x" B?\nB: /[y}]{2}/'),
]
HARMONY_THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
MATCHES = {"choice": "yes|<no>", "regex": "[a-c]/{1,3}", "grammar": r"x([y}]{2})?"}


@of_each_format
@pytest.mark.parametrize("form", FORMS, ids=[form.kind for form in FORMS])
@pytest.mark.parametrize("template", ["", "{# <think> </think> #}"], ids=["plain", "reasons"])
def test_calls_or_an_answer_of_the_form(
    tokenizer: Tokenizer, name: str, form: StructuredOutputs, template: str
) -> None:
    """Each output is one of the two, however it is cut."""
    dialect = Dialect(ChatTemplate("{{ tools }}" + template, {}), tokenizer, name)
    speech = dialect.speech("prompt", ToolSet(FUNCTIONS))
    assert speech is not None
    speech = replace(speech, form=form)
    params, rng, kinds = sampled(tokenizer, speech), random.Random(0), set()
    prefix = "" if not template else HARMONY_THOUGHT if name == "harmony" else "<think>\nHm.\n</think>\n\n"
    format = tool_format("", name)
    forced = ("", "", '{"name": "' if format.is_bare else (format.section or format.call).split()[0])
    for number in range(24):
        text = drawn(tokenizer, params, rng, prefix=prefix + forced[number % 3])
        reader = speech.reader()
        parts = [*(part for char in text for part in reader.push(char)), *reader.finish()]
        said = "".join(part.text for part in parts if isinstance(part, Said))
        called = any(isinstance(part, Called) for part in parts)
        assert called != bool(said), text
        if prefix:
            assert "".join(part.text for part in parts if isinstance(part, Reasoned)) == "Hm.", text
        kinds.add(called)
        if called:
            check([part for part in parts if not isinstance(part, Said)])
        elif form.schema is not None:
            jsonschema.validate(json.loads(said), json.loads(form.schema))
        else:
            assert re.fullmatch(MATCHES[form.kind], said), text
    assert kinds == {True, False}


@pytest.mark.parametrize("name", ["llama3", "json"])
def test_an_answer_that_reads_like_a_call(tokenizer: Tokenizer, name: str) -> None:
    """A text that begins with a brace is an answer; one that may begin as calls do is refused."""
    call = '{"name": "now", "arguments": {}}'
    like = [{"choice": (call,)}, {"regex": r'\{"name": "[a-z]+"(, "arguments": \{\})?\}'},
            {"grammar": r'start: "{" /.*/'}]  # fmt: skip
    own = [{"choice": ("{a}", '{"name":1}')}, {"regex": r"\{[a-z]\}"}, {"grammar": r'start: "{" /[a-z]/ "}"'}]
    speech = dialect_of(tokenizer, name).speech("prompt", ToolSet(FUNCTIONS))
    assert speech is not None
    for keys in like:
        form = StructuredOutputs(**keys)
        with pytest.raises(ConfigError, match=r'an answer must not start with \{"name": , as'):
            sampled(tokenizer, replace(speech, form=form))
    for keys in own:
        form = StructuredOutputs(**keys)
        bound = replace(speech, form=form)
        params, said = sampled(tokenizer, bound), set()
        for number in range(12):
            text = drawn(tokenizer, params, random.Random(number))
            parts = [*(reader := bound.reader()).push(text), *reader.finish()]
            said |= {"".join(part.text for part in parts if isinstance(part, Said))}
        assert any(text.startswith("{") for text in said), said


ODD: list[dict[str, Any]] = [
    {"properties": {"x": {"type": "array", "not": {"pattern": "(?=a)"}}}, "required": ["y"]},
    {"properties": {"x": {"type": "object", "propertyNames": {"pattern": "a"}}}, "required": ["x", []]},
    {"properties": {"x": {"type": "array", "uniqueItems": True}, "y": {"type": "strin"}}, "required": ["x"]},
]


@of_each_format
@pytest.mark.parametrize("schema", ODD, ids=["not", "propertyNames", "uniqueItems"])
@pytest.mark.parametrize("choice", ["form", "required", "named", "beside a strict one"])
def test_a_tool_whose_schema_cannot_be_enforced_is_free_unless_it_is_strict(
    tokenizer: Tokenizer, name: str, schema: dict[str, Any], choice: str
) -> None:
    """The other tools are bound by their schemas all the same."""
    for is_strict in (False, True):
        odd, others = Function("odd", None, schema, strict=is_strict), FUNCTIONS
        if choice == "beside a strict one":
            others = [replace(each, strict=True) for each in FUNCTIONS]
        word = "required" if choice in ("required", "named") else "auto"
        named = "odd" if choice == "named" else ""
        speech = dialect_of(tokenizer, name).speech("prompt", ToolSet([odd, *others], word, named))
        assert speech is not None
        speech = replace(speech, form=FORMS[0] if choice == "form" else None)
        if is_strict:
            with pytest.raises(ConfigError, match=r"^(?!.*%llguidance).*the tool odd: "):
                sampled(tokenizer, speech)
            continue
        params = sampled(tokenizer, speech)
        assert params.structured_outputs is not None
        reader = speech.reader()
        text = drawn(tokenizer, params, random.Random(0), params.structured_outputs.after)
        parts = [*reader.push(text), *reader.finish()]
        called = [part.name for part in parts if isinstance(part, Called)]
        for index, one in enumerate(called):
            written = "".join(part.text for part in parts if isinstance(part, Arguments) and part.index == index)
            bound = SCHEMA if one == FUNCTIONS[0].name else EMPTY if one == "now" else {"type": "object"}
            jsonschema.validate(json.loads(written), bound)
        assert called or choice == "form"


def test_free_calls_have_no_grammar(tokenizer: Tokenizer) -> None:
    speech = dialect_of(tokenizer, "hermes").speech("prompt", ToolSet(FUNCTIONS))
    assert speech is not None
    assert sampled(tokenizer, speech).structured_outputs is None


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "string", "pattern": "x"}}},
        {"required": ["a"]},
        {"required": [[]], "properties": {}},
    ],
)
def test_what_a_format_without_quotes_cannot_keep_is_said(tokenizer: Tokenizer, schema: dict[str, Any]) -> None:
    strict = Function("f", None, schema, strict=True)
    speech = dialect_of(tokenizer, "glm45").speech("prompt", ToolSet([strict], "required"))
    assert speech is not None
    with pytest.raises(ConfigError):
        sampled(tokenizer, speech)


def test_formats_have_the_names_of_the_key() -> None:
    assert set(ToolFormatName.__args__) == set(NAMES)  # type: ignore[attr-defined]
