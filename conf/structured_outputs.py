"""Structured outputs, under vLLM's names: what the text of an output must match."""

from __future__ import annotations

import json as json_library
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .errors import ConfigError

_FORMATS = frozenset(  # that are checked; any other `format` is an annotation
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_EMPTY: dict[str, tuple[Any, ...]] = {  # values of keywords that constrain nothing
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), (True, {})),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), ({},)),
}
_BY_NAME = frozenset(("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"))
_VALUES = frozenset(("const", "enum", "default", "examples", "example"))  # keywords that hold no schema
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_OTHERS = "additionalProperties"
_LARGEST = 1 << 53  # below it each integer is a float
_WIDEST = (1 << 63) - 1024  # bounds beyond it do not compile; int64's and float's are tightened to it


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """What the text of an output must match: one of `json`, `json_object`, `regex`, `choice` and `grammar`.

    `json` is kept as text. Whether a schema, an expression or a grammar is valid shows when it is compiled
    (`models/grammar.py`).

    Raises:
        ConfigError: not exactly one of them is given, or it is of the wrong type.
    """

    json: str | dict[str, Any] | None = None
    """a JSON schema, as a mapping or as its text"""
    json_object: bool = False
    """any JSON object"""
    regex: str | None = None
    """a regular expression, which the whole output matches"""
    choice: tuple[str, ...] = ()
    """texts, of which the output is one"""
    grammar: str | None = None
    """a grammar in Lark's form or in GBNF"""
    disable_any_whitespace: bool = False
    """with json and json_object: no whitespace between tokens of JSON"""
    whitespace_pattern: str | None = None
    """with json and json_object: regular expression of the whitespace between tokens of JSON; null: any"""

    after: str = ""
    """text before which nothing is masked: what follows it first is matched; empty: the whole output"""

    def __post_init__(self) -> None:
        choice = (self.choice,) if isinstance(self.choice, str) else tuple(self.choice or ())
        object.__setattr__(self, "choice", choice)
        texts = ("regex", "grammar", "whitespace_pattern")
        flags = ("json_object", "disable_any_whitespace")
        rules = [
            ("json", self.json is None or isinstance(self.json, str | dict), "a JSON schema"),
            ("choice", all(isinstance(text, str) and text for text in choice), "texts that are not empty"),
            *((name, isinstance(getattr(self, name), str | None), "null or a text") for name in texts),
            *((name, isinstance(getattr(self, name), bool), "true or false") for name in flags),
            ("after", isinstance(self.after, str), "a text"),
        ]
        for name, holds, right in rules:
            if not holds:
                raise ConfigError(f"sampling.structured_outputs.{name}={getattr(self, name)!r}: must be {right}")
        given = self._given
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ConfigError(f"sampling.structured_outputs: must have one of {', '.join(_KINDS)}; found {found}")
        spaced = self.disable_any_whitespace or self.whitespace_pattern is not None
        if spaced and given[0] not in ("json", "json_object"):
            raise ConfigError(f"sampling.structured_outputs: rules for whitespace need json, not {given[0]}")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))

    @classmethod
    def of(cls, keys: Mapping[str, Any]) -> StructuredOutputs:
        """Return what a mapping of these keys stands for; a key that is None counts as absent.

        Raises:
            ConfigError: a key is unknown, or a value is wrong.
        """
        known = [each.name for each in fields(cls)]
        for name in keys:
            if name not in known:
                hint = f"valid: {', '.join(known)}"
                raise ConfigError(f"sampling.structured_outputs.{name}: unknown key; {hint}")
        return cls(**{name: value for name, value in keys.items() if value is not None})

    @property
    def _given(self) -> list[str]:
        return [name for name in _KINDS if getattr(self, name) not in (None, False, ())]

    @property
    def kind(self) -> str:
        """Which of the keys is given."""
        return self._given[0]

    @property
    def schema(self) -> str | None:
        """The JSON schema as text, where the output is JSON."""
        if self.json_object:
            return '{"type": "object"}'
        assert not isinstance(self.json, dict)
        return self.json


def whole_numbers(schema: Any) -> Any:
    """Return a JSON schema with integers for its numbers without a fraction, as in `"maxLength": 20.0`."""
    if isinstance(schema, dict):
        return {key: whole_numbers(value) for key, value in schema.items()}
    if isinstance(schema, list):
        return [whole_numbers(value) for value in schema]
    return int(schema) if isinstance(schema, float) and schema.is_integer() and abs(schema) < _LARGEST else schema


def _schema_text(schema: str | dict[str, Any]) -> str:
    """Write a JSON schema as text.

    Raises:
        ConfigError: it is no JSON.
    """
    try:
        if isinstance(schema, str):
            schema = json_library.loads(schema)
        found = whole_numbers(without_annotations(schema))
        text = json_library.dumps({} if found is True else found, allow_nan=False)
    except RecursionError:
        raise ConfigError("sampling.structured_outputs.json: nested too deep") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"sampling.structured_outputs.json: not JSON ({error})") from None
    if found is False:
        raise ConfigError("sampling.structured_outputs.json: no value matches the schema false")
    return text


def without_annotations(schema: Any, root: Any = None) -> Any:
    """Return a JSON schema without what constrains nothing, in words that the compiler knows.

    Args:
        schema: a part of `root`.
        root: whose definitions it refers to; None: it is the whole schema.

    Raises:
        RecursionError: it is nested too deep.
    """
    root = schema if root is None else root
    if isinstance(schema, list):
        return [without_annotations(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    schema = _with_names(schema, root)
    if set(schema) == {"not"} and schema["not"] in ({}, True, False):  # how zod writes never
        return schema["not"] is False
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "format" and not (isinstance(value, str) and value in _FORMATS):
            continue
        if value in _EMPTY.get(key, ()):
            continue
        if key == "oneOf" and "anyOf" not in schema and _are_constants(value):
            found["anyOf"] = value
        elif key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum") and isinstance(value, int | float):
            found[key] = max(value, -_WIDEST) if key.endswith("inimum") else min(value, _WIDEST)
        elif key in _BY_NAME and isinstance(value, dict):
            found[key] = {name: without_annotations(each, root) for name, each in value.items()}
        else:
            found[key] = value if key in _VALUES else without_annotations(value, root)
    return found


def _with_names(schema: dict[str, Any], root: Any) -> dict[str, Any]:
    """Return a schema with `propertyNames` as rules for properties, if it is an enum, a constant or a pattern alone."""
    names, known, of_each = schema.get("propertyNames"), schema.get("properties", {}), schema.get(_OTHERS, True)
    if isinstance(names, dict) and (place := re.fullmatch(r"#/(\$defs|definitions)/(\w+)", str(names.get("$ref")))):
        group = root.get(place[1]) if isinstance(root, dict) and len(names) == 1 else None
        names = group.get(place[2]) if isinstance(group, dict) else None
    if not isinstance(names, dict) or names.get("type", "string") != "string" or "patternProperties" in schema:
        return schema
    rules = {key: value for key, value in names.items() if key not in ("type", "title", "description")}
    rest = {key: value for key, value in schema.items() if key != "propertyNames"} | {_OTHERS: False}
    texts = [rules["const"]] if "const" in rules else rules.get("enum")
    if len(rules) == 1 and isinstance(texts, list) and isinstance(known, dict):
        return rest | {"properties": {text: known.get(text, of_each) for text in texts if isinstance(text, str)}}
    if len(rules) == 1 and isinstance(pattern := rules.get("pattern"), str) and not known:
        return rest | {"patternProperties": {pattern: of_each}}
    return schema


def _are_constants(branches: Any) -> bool:
    """Return whether each branch has a `const` of its own, so that no value matches two."""
    if not isinstance(branches, list) or not all(isinstance(each, dict) and "const" in each for each in branches):
        return False
    values = {json_library.dumps(whole_numbers(each["const"]), sort_keys=True) for each in branches}
    return len(values) == len(branches)
