"""Structured outputs as users write them: mappings from Python, and schemas with annotations."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from gapless.conf.errors import ConfigError
from gapless.conf.sampling import SamplingParams
from gapless.conf.structured_outputs import StructuredOutputs, without_annotations
from gapless.models.grammar import Grammars
from gapless.models.tokenizer import load_tokenizer

CHECKED = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
ANNOTATIONS: dict[str, Any] = {
    **{"title": "t", "description": "d", "default": "a", "examples": ["a"], "$comment": "c", "deprecated": True},
    **{"readOnly": True, "writeOnly": True, "x-of-ours": {"format": "f"}, "nullable": True, "example": "a"},
    **{"contentEncoding": "base64", "contentMediaType": "text/plain", "discriminator": {"propertyName": "a"}},
    **{"format": "password"},
}
PLACES: dict[str, Any] = {
    "at the top": lambda inner: inner,
    "properties": lambda inner: {"type": "object", "properties": {"format": inner}, "required": ["format"]},
    "items": lambda inner: {"type": "array", "items": inner},
    "anyOf": lambda inner: {"anyOf": [inner, {"type": "null"}]},
    "$defs": lambda inner: {"$ref": "#/$defs/format", "$defs": {"format": inner}},
    "additionalProperties": lambda inner: {"type": "object", "additionalProperties": inner},
}


def compile_schema(schema: Any) -> None:
    Grammars(load_tokenizer(None, 512), 512, [257]).matcher(StructuredOutputs(json=json.dumps(schema)))


@pytest.mark.parametrize("place", PLACES)
def test_annotations_are_ignored_wherever_they_are(place: str) -> None:
    for key, value in ANNOTATIONS.items():
        compile_schema(PLACES[place]({"type": "string", key: value}))


@pytest.mark.parametrize("name", CHECKED)
def test_formats_that_are_checked_stay(name: str) -> None:
    schema = {"type": "string", "format": name}
    assert without_annotations(schema) == schema
    matcher = Grammars(load_tokenizer(None, 512), 512, [257]).matcher(StructuredOutputs(json=schema))
    assert not matcher.consume_tokens(list(b'"~ "'))


def test_values_are_no_schemas() -> None:
    schema = {"const": {"format": "f"}, "enum": [{"format": "f"}], "default": {"format": "f"}}
    assert without_annotations(schema) == schema


@pytest.mark.parametrize(
    ("keyword", "value"),
    [("uniqueItems", True), ("contains", {}), ("not", {"type": "null"}), ("if", {}),
     ("propertyNames", {"maxLength": 2}), ("propertyNames", {"enum": ["a"], "maxLength": 2}),
     ("propertyNames", {"pattern": {}}), ("propertyNames", {"$ref": "#/$defs/n"}), ("unevaluatedProperties", False),
     ("dependentRequired", {"a": ["b"]})],
)  # fmt: skip
def test_rules_that_cannot_be_kept_are_refused_by_name(keyword: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf'^[^\n]*json: .*"{keyword}"'):
        compile_schema({"type": ["object", "array"], keyword: value})


OF = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CLOSED = {**OF, "additionalProperties": False}
VALUES: list[Any] = [None, True, 0, 1, 2, 7, -3, 0.5, "", "a", "ab", "2024-02-29", "x-1", [], [1], [1, 1], [1, "a"],
                     ["a", 1, None], {}, {"a": 1}, {"a": "x"}, {"a": 1, "b": 2}, {"b": "x"}, {"k": "a"}, {"k": "b"},
                     {"x-1": 3}, {"a": {"a": {"a": {}}}}]  # fmt: skip
NAMED: list[dict[str, Any]] = [
    *({}, {"additionalProperties": {"type": "integer"}, "required": ["a"]}, {"additionalProperties": False}),
    *({"properties": {"a": {"type": "string"}, "k": {"type": "string"}}}, {"maxProperties": 1}, {"type": ["object"]}),
]
SCHEMAS: list[Any] = [
    *(True, {}, {"type": "string"}, {"type": ["integer", "null"]}, {"type": "array"}, OF, CLOSED),
    *({"const": {"a": 1}}, {"const": 1.0}, {"enum": [1, "a", None, [1]]}, {"anyOf": [{"enum": ["a"]}, {"const": 7}]}),
    *({"oneOf": [{"const": 1}, {"const": 2}]}, {"oneOf": [{"type": "integer"}, {"type": "string"}]}),
    {"oneOf": [{**OF, "properties": {"a": {"const": 1}}}, {**OF, "properties": {"a": {"const": "x"}}}]},
    {"anyOf": [{"not": {}}, {"type": "string"}, False]},
    {"type": "object", "properties": {"a": {"not": {}}, "b": True}},
    {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}},
    {"type": "object", "patternProperties": {"^x-": {"type": "integer"}}, "additionalProperties": False},
    *({"type": "object", "propertyNames": {"enum": ["a", "b", 1]}, **of} for of in NAMED),
    {"type": "object", "propertyNames": {"const": "k"}, "additionalProperties": {"enum": ["a"]}},
    {"type": "object", "propertyNames": {"type": "string", "pattern": "^x-"}, "additionalProperties": {"minimum": 3}},
    {
        "type": "object",
        "propertyNames": {"$ref": "#/$defs/Key"},
        "$defs": {"Key": {"enum": ["a", "b"], "title": "Key", "description": "of pydantic", "type": "string"}},
    },
    {"type": "object", "minProperties": 1, "maxProperties": 1},
    {
        "type": "object",
        "unevaluatedProperties": True,
        "dependentRequired": {},
        "additionalProperties": {"type": "string"},
    },
    {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "additionalProperties": {"$ref": "#/$defs/n"}}}},
    {"allOf": [{"type": "integer"}, {"minimum": 1}, {"exclusiveMaximum": 7}]},
    *({"type": "integer", "multipleOf": 7}, {"type": "string", "minLength": 2}, {"type": "string", "pattern": "^a"}),
    *({"type": "string", "format": "date"}, {"type": "array", "minItems": 1, "maxItems": 2, "uniqueItems": False}),
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
    {"type": "array", "items": {"type": "integer"}, "unevaluatedItems": {}},
    *(
        {"type": kind, f"{prefix}inimum": -most, f"{prefix}aximum": most}
        for kind in ("integer", "number")
        for prefix in ("m", "exclusiveM")
        for most in (1 << 63, 1 << 64, 1e30, 3.4028235e38, 1.7976931348623157e308)
    ),
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_the_grammar_of_a_schema_admits_what_is_valid(schema: Any) -> None:
    """As the package `jsonschema` does, which passes JSON Schema's own test suite."""
    valid = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).is_valid
    start = Grammars(load_tokenizer(None, 512), 512, [257]).matcher(StructuredOutputs(json=json.dumps(schema)))
    for value in VALUES:
        matcher, text = start.deep_copy(), list(json.dumps(value).encode())
        is_admitted = matcher.try_consume_tokens(text) == len(text) and matcher.is_accepting()
        assert is_admitted == valid(value), value


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        (False, "the schema is false, which no output matches"),
        ({"not": {}}, "the schema is false, which no output matches"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf: its branches may overlap.*; use anyOf"),
        ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "oneOf: its branches may overlap"),
        ({"$ref": "https://example.org/schema"}, "https://example.org/schema"),
    ],
)
def test_schemas_that_are_refused(schema: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=rf"^sampling\.structured_outputs\.json: [^\n]*{named}"):
        compile_schema(schema)


def test_python_takes_a_mapping_as_requests_do() -> None:
    schema = {"type": "integer"}
    found = SamplingParams(structured_outputs={"json": schema, "regex": None})  # type: ignore[arg-type]
    assert found.structured_outputs == StructuredOutputs(json=schema)
    assert SamplingParams(structured_outputs={"choice": ["a", "b"]}).structured_outputs == StructuredOutputs(  # type: ignore[arg-type]
        choice=("a", "b")
    )


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"jsn": {}}, r"structured_outputs\.jsn: unknown key; valid: json,"),
        ({"regex": 5}, r"structured_outputs\.regex"),
        ({}, r"structured_outputs: give exactly one of"),
        ("a+", r"structured_outputs='a\+': must be null, StructuredOutputs or a mapping"),
    ],
)
def test_a_wrong_mapping_is_one_line_that_names_the_key(given: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=rf"^sampling\.{named}[^\n]*$"):
        SamplingParams(structured_outputs=given)
