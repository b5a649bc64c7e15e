"""Writes the grammar of calls, in the format of a model, for llguidance: names that are there, and their schemas."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from ....conf.errors import ConfigError
from ....conf.structured_outputs import StructuredOutputs, without_annotations
from .formats import ToolFormat
from .tool_set import Function, ToolSet

Literals = Callable[[str], str]  # a text as the grammar has it: special tokens by their ids
_AS_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as templates write JSON


def call_grammar(tools: ToolSet, format: ToolFormat, literals: Literals) -> StructuredOutputs:
    """Return what an output must match: calls from its beginning where they are forced, else from their first words on.

    Raises:
        ConfigError: a schema cannot be had in this format.
    """
    after = "" if tools.choice == "required" else _first_words(format)
    rules = [_Rules(number, each, tools, format, literals) for number, each in enumerate(tools.callable)]
    first = " | ".join(f"first_{number}" for number in range(len(rules)))
    call = " | ".join(f"call_{number}" for number in range(len(rules)))
    separator, end = literals(format.separator), literals(format.section_end)
    more = f"({separator} ({call}))*" if tools.is_parallel else ""
    lines = [f"start: ({first}) {more} {end}"]
    for number, each in enumerate(rules):
        lines += [f"first_{number}: {each.from_first_words(after)}", f"call_{number}: {each.whole}", *each.further]
    lines.append("TEXT: /(.|\\n)*/")
    return StructuredOutputs(grammar="%llguidance {}\n" + "\n".join(lines), after=after)


def _first_words(format: ToolFormat) -> str:
    """Return the text that tells a call, from which on an output must match."""
    if format.is_bare:
        return '{"name": '
    begin = format.section or format.call
    return next((text for text in format.opens if begin.startswith(text)), begin)


class _Rules:
    """The rules of one function's calls."""

    def __init__(self, number: int, function: Function, tools: ToolSet, format: ToolFormat, literals: Literals) -> None:
        self.further: list[str] = []
        self._number = number
        self._format = format
        self._literals = literals
        is_checked = tools.choice == "required" or function.strict or format.payload == "pairs"
        schema = _plain(function.schema) if is_checked else {"type": "object"}
        name = function.name
        if format.payload == "object":
            self._head = f'{format.call}{{"name": {json.dumps(name)}, "{format.key}": '
            self._rest = f"{_json(schema)} {literals('}' + format.call_end)}"
        elif format.payload == "named":
            self._head = format.call + format.name_begin + name + ("" if format.name_begin else self._name_end)
            rest = f"{_json(schema)} {literals(format.call_end)}"
            self._rest = f'":" /[0-9]+/ {literals(self._name_end)} {rest}' if format.name_begin else rest
        else:
            self._head = format.call + name + format.name_end
            self._rest = f"{' '.join(self._pairs(schema))} {literals(format.call_end)}"

    @property
    def _name_end(self) -> str:
        return " <|constrain|>json<|message|>" if self._format.header else self._format.name_end

    @property
    def whole(self) -> str:
        """A call."""
        return f"{self._literals(self._head)} {self._rest}"

    def from_first_words(self, after: str) -> str:
        """Return the first call, with what stands before it, without the words `after`."""
        return f"{self._literals((self._format.section + self._head).removeprefix(after))} {self._rest}"

    def _pairs(self, schema: dict[str, Any]) -> Iterator[str]:
        """Yield the keys and values, as a rule each, in the order of the schema.

        Raises:
            ConfigError: a value is a text with rules that cannot be kept without JSON's quotes.
        """
        begin, key_end, value, value_end = self._format.pairs
        required, properties = schema.get("required") or [], schema.get("properties") or {}
        is_list = isinstance(required, list) and isinstance(properties, dict)
        if not is_list or any(not isinstance(key, str) or key not in properties for key in required):
            raise ConfigError("sampling.structured_outputs.grammar: a tool's schema requires what it does not describe")
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        for place, (key, of_key) in enumerate(properties.items()):
            name = f"pair_{self._number}_{place}"
            head = self._literals(begin + key + key_end + value)
            if isinstance(of_key, dict) and of_key.get("type") == "string":
                if set(of_key) & {"pattern", "minLength", "maxLength", "format"}:
                    raise ConfigError(
                        f"sampling.structured_outputs.grammar: {key}: this model's format has no rules for texts"
                    )
                texts = [of_key["const"]] if "const" in of_key else of_key.get("enum")
                if isinstance(texts, list) and texts:
                    content = f"({' | '.join(self._literals(str(text) + value_end) for text in texts)})"
                else:
                    self.further.append(f"{name}_text[lazy]: TEXT {self._literals(value_end)}")
                    content = f"{name}_text"
            else:
                own = {**of_key, **definitions} if isinstance(of_key, dict) else of_key
                content = f"{_json(own)} {self._literals(value_end)}"
            self.further.append(f"{name}: {head} {content}")
            yield name if key in required else f"{name}?"


def _plain(schema: dict[str, Any]) -> Any:
    """Return a tool's schema without what only annotates.

    Raises:
        ConfigError: it is nested too deep.
    """
    try:
        return without_annotations(schema)
    except RecursionError:
        raise ConfigError("sampling.structured_outputs.grammar: a tool's schema is nested too deep") from None


def _json(schema: Any) -> str:
    """Write a schema into a grammar.

    Raises:
        ConfigError: it is no JSON.
    """
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": _AS_WRITTEN}
    try:
        return "%json " + json.dumps(schema, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"sampling.structured_outputs.grammar: a tool's schema is not JSON ({error})") from None
