"""Builds llguidance grammars of tool calls in a model's format, from the tools' names and schemas."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

from ....conf.errors import ConfigError
from ....conf.structured_outputs import StructuredOutputs, whole_numbers, without_annotations
from ....models.grammar import Grammars
from ....models.tokenizer import Tokenizer, load_tokenizer
from .formats import ReasoningFormat, ToolFormat
from .tool_set import Function, ToolSet

Literals = Callable[[str], str]  # a text as a grammar literal: special tokens by their ids
Checks = Callable[[Any], str]  # a schema; returns why it cannot be enforced, "" if it can
BARE_CALL = '{"name": '  # start of calls in formats without a start marker
_AS_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as templates write JSON
_COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
_HEADER = "%llguidance {}\n"


def call_grammar(grammars: Grammars, *, tools: ToolSet, format: ToolFormat) -> StructuredOutputs:
    """Return the grammar of calls. It applies from the start if a call is required, else from a call's first words on.

    Raises:
        ConfigError: the schema of a strict tool cannot be enforced in this format.
    """
    after = "" if tools.choice == "required" else _first_words(format)
    return _with_calls(["start: calls"], grammars, tools, format, after)


def either_grammar(
    grammars: Grammars,
    *,
    tools: ToolSet,
    format: ToolFormat,
    form: StructuredOutputs,
    reasoning: ReasoningFormat | None = None,
    in_reasoning: bool = False,
    budget: int | None = None,
) -> StructuredOutputs:
    """Return the grammar of an output that is either calls or an answer of the given form.

    Args:
        grammars: the model's grammars.
        tools: tools that may be called.
        format: format of calls.
        form: form of the answer.
        reasoning: format of reasoning that the output may begin with; None: no reasoning.
        in_reasoning: whether the output follows reasoning that the prompt has begun.
        budget: maximum reasoning tokens; enforced only if the end marker is a special token.

    Raises:
        ConfigError: a schema of a strict tool, or the form, cannot be enforced.
    """
    literals = partial(_literal, grammars.tokenizer)
    lines = [f"answer: {literals(format.answer)} {_answer(form, format)}"]
    begin = f"(reasoned {_SPACE})? " if reasoning else _SPACE if in_reasoning else ""
    if reasoning is not None:
        end, limit = literals(reasoning.end), "" if budget is None else f"[max_tokens={budget}]"
        lines.append(f"reasoned: {literals(reasoning.begin)} thought")
        if end.startswith("<"):
            lines += [f"thought: thinking? {end}", f"thinking{limit}: /(.|\\n)+/"]
        else:
            lines.append(f"thought[lazy]: TEXT {end}")
    return _with_calls([*lines, f"start: {begin} (calls | answer)"], grammars, tools, format, is_either=True)


def _with_calls(
    lines: list[str], grammars: Grammars, tools: ToolSet, format: ToolFormat, after: str = "", is_either: bool = False
) -> StructuredOutputs:
    """Return a grammar with the rule `calls`. If it does not compile, each tool's schema is checked separately.

    Raises:
        ConfigError: the schema of a strict tool cannot be enforced.
    """

    def written(fault: Checks) -> StructuredOutputs:
        calls = _calls(tools, format, partial(_literal, grammars.tokenizer), after, is_either, fault)
        return StructuredOutputs(grammar=_HEADER + "\n".join([*lines, *calls, _TEXT]), after=after)

    try:
        grammars.check(found := written(lambda schema: ""))
    except ConfigError:
        found = written(_fault)
    return found


_SPACE = '"\\n\\n"?'  # models write it after reasoning
_TEXT = "TEXT: /(.|\\n)*/"


def _literal(tokenizer: Tokenizer, text: str) -> str:
    """Return a text as a grammar literal: special tokens, which have no text in llguidance, by their ids."""
    found, place = [], 0
    for token in tokenizer.encode(text, add_special=False):
        if tokenizer.is_silent(token) and (shown := tokenizer.decode([token], skip_special=False)):
            before, place = place, text.find(shown, place)
            found += [*_quoted(text[before:place]), f"<[{token}]>"]
            place += len(shown)
    return " ".join([*found, *_quoted(text[place:])])


def _quoted(text: str) -> list[str]:
    return [json.dumps(text, ensure_ascii=False)] if text else []


def _fault(schema: Any) -> str:
    """Return why llguidance cannot compile a schema; "" if it can."""
    import llguidance

    found = " ".join(llguidance.LLMatcher.validate_grammar(f"{_HEADER}start: {_json(schema)}").split())
    return found.partition(" 1 | ")[0].removeprefix("at 2(8): failed to compile JSON schema: ")  # without the grammar


def _calls(
    tools: ToolSet, format: ToolFormat, literals: Literals, after: str, is_either: bool, fault: Checks
) -> Iterator[str]:
    """Yield the rule `calls`, without its leading words `after`, and the rules that it needs."""
    rules = [_Rules(*each, format, literals, is_either, fault) for each in enumerate(tools.callable)]
    first = " | ".join(f"first_{number}" for number in range(len(rules)))
    call = " | ".join(f"call_{number}" for number in range(len(rules)))
    more = f"({literals(format.separator)} ({call}))*" if tools.is_parallel else ""
    yield f"calls: ({first}) {more} {literals(format.section_end)}"
    for number, each in enumerate(rules):
        yield f"first_{number}: {each.first(after)} rest_{number}"
        yield f"call_{number}: {each.head} rest_{number}"
        yield f"rest_{number}: {each.rest}"
        yield from each.further


def _whole_call(name: str, key: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a call as a JSON object, with the definitions of its arguments' schema."""
    found = {"type": "object", "properties": {"name": {"const": name}, key: schema}, "required": ["name", key]}
    return {**found, "additionalProperties": False, **_definitions(schema)}


def _definitions(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the definitions that a schema's references may point to."""
    return {word: schema[word] for word in ("$defs", "definitions") if word in schema}


def _answer(form: StructuredOutputs, format: ToolFormat) -> str:
    """Return the form of an answer as a part of a grammar.

    If calls have no start marker, the answer's JSON is compact, which distinguishes it from a call.

    Raises:
        ConfigError: it is not a valid regex or grammar, or it may begin like a call.
    """
    import llguidance

    if form.schema is not None:
        rules: dict[str, Any] = {"whitespace_flexible": not form.disable_any_whitespace}
        if form.whitespace_pattern is not None:
            rules["whitespace_pattern"] = form.whitespace_pattern
        return _json(json.loads(form.schema), _COMPACT if format.is_bare else rules)
    if format.is_bare and _may_be_call(form):
        text = f"with tools, an answer must not start with {BARE_CALL}, as this model's tool calls do"
        raise ConfigError(f"sampling.structured_outputs.{form.kind}: {text}")
    if form.choice:
        return f"({' | '.join(json.dumps(text, ensure_ascii=False) for text in form.choice)})"
    try:
        if form.regex is None:
            lark = llguidance.grammar_from("grammar", form.grammar or "")
        else:
            lark = json.loads(llguidance.grammar_from("regex", form.regex))["grammars"][0]["lark_grammar"]
    except ValueError as error:
        raise ConfigError(f"sampling.structured_outputs.{form.kind}: {' '.join(str(error).split())}") from error
    return f"%lark {{\n{lark}\n}}"


def _may_be_call(form: StructuredOutputs) -> bool:
    """Return whether a text of the form may begin like a call in a format without a start marker."""
    if form.choice:
        return any(text.startswith(BARE_CALL) for text in form.choice)
    return _of_bytes().matcher(form).try_consume_tokens(list(BARE_CALL.encode())) == len(BARE_CALL)


@cache
def _of_bytes() -> Grammars:
    return Grammars(load_tokenizer(None, 512), 512, [257])


def _first_words(format: ToolFormat) -> str:
    """Return the text that marks a call, after which the grammar applies."""
    if format.is_bare:
        return BARE_CALL
    begin = format.section or format.call
    return next((text for text in format.opens if begin.startswith(text)), begin)


class _Rules:
    """The rules of one function's calls: their leading text, and what follows it.

    Raises:
        ConfigError: the function is strict and its schema cannot be enforced.
    """

    def __init__(
        self, number: int, function: Function, format: ToolFormat, literals: Literals, is_either: bool, fault: Checks
    ) -> None:
        self.further: list[str] = []
        self._number, self._function, self._format, self._literals = number, function, format, literals
        self._fault = fault
        name, schema = function.name, _plain(function.schema)
        if format.payload != "pairs" and (error := fault(_whole_call(name, format.key, schema))):
            self._leave_out(error)
            schema = {"type": "object"}
        if format.is_bare and is_either:  # as JSON lexemes: llguidance's lexer does not backtrack from a longer one
            self._head, self.rest = "", _json(_whole_call(name, format.key, schema))
        elif format.payload == "object":
            self._head = f'{format.call}{BARE_CALL}{json.dumps(name)}, "{format.key}": '
            self.rest = f"{_json(schema)} {literals('}' + format.call_end)}"
        elif format.payload == "named":
            self._head = format.call + format.name_begin + name + ("" if format.name_begin else self._name_end)
            rest = f"{_json(schema)} {literals(format.call_end)}"
            id_end = f"{literals(format.id_begin)} /[0-9]+/ {literals(self._name_end)} {rest}"
            self.rest = id_end if format.name_begin else rest
        else:
            self._head = format.call + name + format.name_end
            self.rest = f"{' '.join(self._pairs(schema))} {literals(format.call_end)}"

    @property
    def _name_end(self) -> str:
        return self._format.channels.json_begin if self._format.channels else self._format.name_end

    @property
    def head(self) -> str:
        """The leading text of a call."""
        return self._literals(self._head)

    def first(self, after: str) -> str:
        """Return the leading text of the first call, including the section marker, without the words `after`."""
        return self._literals((self._format.section + self._head).removeprefix(after))

    def _leave_out(self, why: str) -> None:
        """Raise `ConfigError` about an unenforceable schema if the function is strict."""
        if self._function.strict:
            raise ConfigError(f"sampling.structured_outputs.grammar: the tool {self._function.name}: {why}")

    def _pairs(self, schema: dict[str, Any]) -> Iterator[str]:
        """Yield one rule per key and value, in the order of the schema. Strings have no JSON quotes."""
        begin, key_end, value, value_end = self._format.pairs
        required, properties = schema.get("required") or [], schema.get("properties") or {}
        required, known = (required if isinstance(required, list) else [None]), list(properties)
        if not isinstance(properties, dict) or any(key not in known for key in required):
            self._leave_out("its schema requires a property that it does not define")
            properties = properties if isinstance(properties, dict) else {}
        for place, (key, of_key) in enumerate(properties.items()):
            name = f"pair_{self._number}_{place}"
            head = self._literals(begin + key + key_end + value)
            if isinstance(of_key, dict) and of_key.get("type") == "string":
                if set(of_key) & {"pattern", "minLength", "maxLength", "format"}:
                    self._leave_out(f"{key}: string constraints are not supported in this model's format")
                texts = [of_key["const"]] if "const" in of_key else of_key.get("enum")
                if isinstance(texts, list) and texts:
                    content = f"({' | '.join(self._literals(str(text) + value_end) for text in texts)})"
                else:
                    self.further.append(f"{name}_text[lazy]: TEXT {self._literals(value_end)}")
                    content = f"{name}_text"
            else:
                own = {**of_key, **_definitions(schema)} if isinstance(of_key, dict) else of_key
                if error := self._fault(own):
                    self._leave_out(f"{key}: {error}")
                    own = {}
                content = f"{_json(own)} {self._literals(value_end)}"
            self.further.append(f"{name}: {head} {content}")
            yield name if key in required else f"{name}?"


def _plain(schema: dict[str, Any]) -> Any:
    """Return a tool's schema without annotations.

    Raises:
        ConfigError: it is nested too deeply.
    """
    try:
        return without_annotations(schema)
    except RecursionError:
        raise ConfigError("sampling.structured_outputs.grammar: a tool's schema is nested too deeply") from None


def _json(schema: Any, rules: Mapping[str, Any] = _AS_WRITTEN) -> str:
    """Return a schema as a part of a grammar, with rules for whitespace.

    Raises:
        ConfigError: it is not JSON.
    """
    schema = {} if schema is True else schema
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": dict(rules)}
    try:
        return "%json " + json.dumps(whole_numbers(schema), allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"sampling.structured_outputs.grammar: a schema is not JSON ({error})") from None
