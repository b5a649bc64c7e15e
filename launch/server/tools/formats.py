"""How models write calls of tools (`formats.toml`) and their reasoning, and which format a chat template has."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """The texts between which a model writes calls.

    An output is text, then calls. Each call has a payload: an `object` of JSON with the name and the arguments; the
    name and then the arguments as JSON (`named`); or the name and then `pairs` of keys and values.
    """

    name: str
    marks: tuple[str, ...] = ()  # texts that a chat template of this format has, all of them
    payload: Literal["object", "named", "pairs"] = "object"
    opens: tuple[str, ...] = ()  # texts with which calls begin; empty: an output that begins with `{` may be a call
    section: str = ""  # what is written before the first call
    section_end: str = ""  # and behind the last
    call: str = ""  # what is written before each call
    call_end: str = ""  # and behind each
    separator: str = ""  # what is written between calls
    key: str = "arguments"  # the arguments' key, of an object
    name_begin: str = ""  # what is written before the name, where it is not part of it
    name_end: str = ""  # what ends the name, where it is no object's
    header: str = ""  # regular expression of a name in what stands before `name_end`; what has none is no call
    answer: str = ""  # what is written before an answer that is no call
    # What stands before and behind the key, and before and behind the value.
    pairs: tuple[str, str, str, str] = ("", "", "", "")

    @property
    def is_bare(self) -> bool:
        """Whether nothing but its first brace tells a call."""
        return not self.call and not self.section

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts that may be special tokens."""
        own = (*self.opens, self.section, self.section_end, self.call, self.call_end, self.name_begin, self.name_end)
        return (*own, *self.pairs, *(_OF_CHANNELS if self.header else ()))


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The texts between which a model writes its reasoning, which comes first."""

    begin: str
    end: str


_OF_CHANNELS = ("<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")
ANALYSIS = ReasoningFormat("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")  # harmony's
_FILE = Path(__file__).with_name("formats.toml")
FORMATS = msgspec.toml.decode(_FILE.read_bytes(), type=dict[str, tuple[ToolFormat, ...]])["format"]
NAMES = tuple(dict.fromkeys(each.name for each in FORMATS))
REASONING = (
    ReasoningFormat("<think>", "</think>"),
    ReasoningFormat("[THINK]", "[/THINK]"),
    ReasoningFormat("<seed:think>", "</seed:think>"),
)


def tool_format(template: str, name: str | None) -> ToolFormat:
    """Return the format of that name, else that of a chat template. One without marks has the generic one, of JSON."""
    if name is not None:
        return next(each for each in FORMATS if each.name == name)
    return next(each for each in FORMATS if all(mark in template for mark in each.marks))


def reasoning_format(template: str) -> ReasoningFormat | None:
    """Return how the model of a chat template writes its reasoning; None: it has none of these."""
    return next((each for each in REASONING if each.end in template), None)


NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)  # of a tool, as OpenAI and Anthropic take them
