"""Formats of tool calls (`formats.toml`) and of reasoning, and their detection from chat templates."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers around a model's reasoning, which comes first."""

    begin: str
    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """Channels of an output, each with a header and a content: reasoning, calls and answers."""

    name: str  # regex of a function's name in a header; no match: not a call
    reasoning: str  # part of the header of reasoning
    ends: tuple[str, ...]  # end markers of a content; the first one ends reasoning
    json_begin: str  # in grammars, between a function's name and its arguments
    first: ReasoningFormat  # in grammars, reasoning before calls or an answer


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """The markers around a model's tool calls.

    An output is text, then calls. Each call has a payload: a JSON `object` with the name and the arguments; the name,
    then the arguments as JSON (`named`); or the name, then `pairs` of keys and values.
    """

    name: str
    marks: tuple[str, ...] = ()  # all are contained in chat templates of this format
    payload: Literal["object", "named", "pairs"] = "object"
    opens: tuple[str, ...] = ()  # start markers of calls; empty: an output that begins with `{` may be a call
    section: str = ""  # before the first call
    section_end: str = ""  # after the last call
    call: str = ""  # before each call
    call_end: str = ""  # after each call
    separator: str = ""  # between calls
    key: str = "arguments"  # key of the arguments in an `object`
    name_begin: str = ""  # before the name; with it, the model writes the call's id, which starts with this
    id_begin: str = ""  # after the name, before the rest of an id
    name_end: str = ""  # after the name, unless in an `object`
    id_length: int = 0  # the only length of ids that the templates accept; 0: any
    channels: Channels | None = None  # None: outputs are not divided into channels
    answer: str = ""  # before an answer that is not a call
    # Before and after the key, and before and after the value.
    pairs: tuple[str, str, str, str] = ("", "", "", "")

    @property
    def is_bare(self) -> bool:
        """Whether calls have no start marker except the first brace."""
        return not self.call and not self.section

    @property
    def texts(self) -> tuple[str, ...]:
        """All markers that may be special tokens."""
        own = (*self.opens, self.section, self.section_end, self.call, self.call_end, self.name_begin, self.name_end)
        return (*own, *self.pairs, *((*self.channels.ends, self.channels.json_begin) if self.channels else ()))


_FILE = Path(__file__).with_name("formats.toml")
FORMATS = msgspec.toml.decode(_FILE.read_bytes(), type=dict[str, tuple[ToolFormat, ...]])["format"]
NAMES = tuple(dict.fromkeys(each.name for each in FORMATS))
REASONING = (
    ReasoningFormat("<think>", "</think>"),
    ReasoningFormat("[THINK]", "[/THINK]"),
    ReasoningFormat("<seed:think>", "</seed:think>"),
)


def tool_format(template: str, name: str | None) -> ToolFormat:
    """Return the named format, else the format of a chat template; by default the generic JSON format."""
    if name is not None:
        return next(each for each in FORMATS if each.name == name)
    return next(each for each in FORMATS if all(mark in template for mark in each.marks))


def reasoning_format(template: str) -> ReasoningFormat | None:
    """Return the reasoning format of a chat template; None: no known format."""
    return next((each for each in REASONING if each.end in template), None)


NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)  # tool names that OpenAI and Anthropic accept
