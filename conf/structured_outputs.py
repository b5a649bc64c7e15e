"""Structured outputs (guided decoding), under vLLM's names."""

from __future__ import annotations

import json as json_library
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .errors import ConfigError

_FORMATS = frozenset(  # formats that are enforced; any other is an annotation
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_EMPTY: dict[str, tuple[Any, ...]] = {  # keyword values without effect
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), (True, {})),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), ({},)),
}
_BY_NAME = frozenset(("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"))
_VALUES = frozenset(("const", "enum", "default", "examples", "example"))  # keywords whose values are not schemas
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_OTHERS = "additionalProperties"
_LARGEST = 1 << 53  # integers below it are exact as floats
_WIDEST = (1 << 63) - 1024  # larger bounds do not compile and are clamped to it


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """A constraint on the output text: one of `json`, `json_object`, `regex`, `choice` and `grammar`.

    `json` is stored as text. Schemas, regular expressions and grammars are validated when they are compiled
    (`models/grammar.py`).

    Raises:
        ConfigError: not exactly one is given, or a value has the wrong type.
    """

    json: str | dict[str, Any] | None = None
    """a JSON schema, as a mapping or as text"""
    json_object: bool = False
    """any JSON object"""
    regex: str | None = None
    """a regular expression that the whole output must match"""
    choice: tuple[str, ...] = ()
    """allowed outputs"""
    grammar: str | None = None
    """a grammar in Lark or GBNF syntax"""
    disable_any_whitespace: bool = False
    """with json and json_object: no whitespace between JSON tokens"""
    whitespace_pattern: str | None = None
    """with json and json_object: regular expression of the whitespace between JSON tokens; null: any"""
    after: str = ""
    """the constraint applies after the first occurrence of this text; empty: from the start"""

    def __post_init__(self) -> None:
        choice = (self.choice,) if isinstance(self.choice, str) else tuple(self.choice or ())
        object.__setattr__(self, "choice", choice)
        texts = ("regex", "grammar", "whitespace_pattern")
        flags = ("json_object", "disable_any_whitespace")
        rules = [
            ("json", self.json is None or isinstance(self.json, str | dict), "a JSON schema"),
            ("choice", all(isinstance(text, str) and text for text in choice), "non-empty strings"),
            *((name, isinstance(getattr(self, name), str | None), "null or a string") for name in texts),
            *((name, isinstance(getattr(self, name), bool), "true or false") for name in flags),
            ("after", isinstance(self.after, str), "a string"),
        ]
        for name, holds, right in rules:
            if not holds:
                raise ConfigError(f"sampling.structured_outputs.{name}={getattr(self, name)!r}: must be {right}")
        given = self._given
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ConfigError(f"sampling.structured_outputs: give exactly one of {', '.join(_KINDS)}; found {found}")
        spaced = self.disable_any_whitespace or self.whitespace_pattern is not None
        if spaced and given[0] not in ("json", "json_object"):
            raise ConfigError(
                f"sampling.structured_outputs: whitespace options apply to json and json_object, not to {given[0]}"
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))

    @classmethod
    def of(cls, keys: Mapping[str, Any]) -> StructuredOutputs:
        """Build from a mapping; None values count as absent.

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
        """The name of the given constraint."""
        return self._given[0]

    @property
    def schema(self) -> str | None:
        """The JSON schema as text, if the output is JSON."""
        if self.json_object:
            return '{"type": "object"}'
        assert not isinstance(self.json, dict)
        return self.json


def whole_numbers(schema: Any) -> Any:
    """Return a JSON schema with integral floats as integers, as in `"maxLength": 20.0`."""
    if isinstance(schema, dict):
        return {key: whole_numbers(value) for key, value in schema.items()}
    if isinstance(schema, list):
        return [whole_numbers(value) for value in schema]
    return int(schema) if isinstance(schema, float) and schema.is_integer() and abs(schema) < _LARGEST else schema


def _schema_text(schema: str | dict[str, Any]) -> str:
    """Write a JSON schema as text.

    Raises:
        ConfigError: it is not JSON.
    """
    try:
        if isinstance(schema, str):
            schema = json_library.loads(schema)
        found = whole_numbers(without_annotations(schema))
        text = json_library.dumps({} if found is True else found, allow_nan=False)
    except RecursionError:
        raise ConfigError("sampling.structured_outputs.json: nested too deeply") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"sampling.structured_outputs.json: not JSON ({error})") from None
    if found is False:
        raise ConfigError("sampling.structured_outputs.json: the schema is false, which no output matches")
    return text


def without_annotations(schema: Any, root: Any = None) -> Any:
    """Return a JSON schema without annotations, rewritten to keywords that the compiler supports.

    Args:
        schema: a part of `root`.
        root: the whole schema, for its definitions; None: `schema` itself.

    Raises:
        RecursionError: it is nested too deeply.
    """
    root = schema if root is None else root
    if isinstance(schema, list):
        return [without_annotations(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    schema = _with_names(schema, root)
    if set(schema) == {"not"} and schema["not"] in ({}, True, False):  # "never" in zod
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
    """Rewrite `propertyNames` to properties or patternProperties, if it is only an enum, a constant or a pattern."""
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
    """Return whether each branch has a distinct `const`, so that no value matches two."""
    if not isinstance(branches, list) or not all(isinstance(each, dict) and "const" in each for each in branches):
        return False
    values = {json_library.dumps(whole_numbers(each["const"]), sort_keys=True) for each in branches}
    return len(values) == len(branches)
