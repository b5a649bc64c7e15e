"""How models write calls of tools and their reasoning, each format as data, and which of them a chat template has."""
# ruff: noqa: RUF001

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """The texts between which a model writes calls.

    An output is text, then calls. Each call has a payload: an `object` of JSON with the name and the arguments; the
    name and then the arguments as JSON (`named`); or the name and then `pairs` of keys and values.
    """

    name: str
    marks: tuple[str, ...] = ()
    """texts that a chat template of this format has, all of them"""
    payload: Literal["object", "named", "pairs"] = "object"
    opens: tuple[str, ...] = ()
    """texts with which calls begin; empty: an output that begins with `{` may be a call"""
    section: str = ""
    """what is written before the first call"""
    section_end: str = ""
    """and behind the last"""
    call: str = ""
    """what is written before each call"""
    call_end: str = ""
    """and behind each"""
    separator: str = ""
    """what is written between calls"""
    key: str = "arguments"
    """the arguments' key, of an object"""
    name_begin: str = ""
    """what is written before the name, where it is not part of it"""
    name_end: str = ""
    """what ends the name, where it is no object's"""
    header: str = ""
    """regular expression of a name in what stands before `name_end`; what has none is no call"""
    answer: str = ""
    """what is written before an answer that is no call"""
    pairs: tuple[str, str, str, str] = ("", "", "", "")
    """what stands before and behind the key, and before and behind the value"""

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
GENERIC = ToolFormat(name="json", separator="\n")
HARMONY = ToolFormat(
    name="harmony",
    marks=("<|channel|>", "<|start|>"),
    payload="named",
    opens=("<|channel|>", "<|start|>"),
    call="<|channel|>commentary to=functions.",
    name_end="<|message|>",
    header=r"to=functions\.([\w.-]+)",
    call_end="<|call|>",
    answer="<|channel|>final<|message|>",
)
ANALYSIS = ReasoningFormat("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")  # harmony's
FORMATS = (  # a template is of the first that it has all marks of
    HARMONY,
    ToolFormat(
        name="kimi_k2",
        marks=("<|tool_calls_section_begin|>",),
        payload="named",
        opens=("<|tool_calls_section_begin|>",),
        section="<|tool_calls_section_begin|>",
        section_end="<|tool_calls_section_end|>",
        call="<|tool_call_begin|>",
        name_begin="functions.",
        name_end="<|tool_call_argument_begin|>",
        call_end="<|tool_call_end|>",
    ),
    ToolFormat(
        name="deepseek_v3",
        marks=("<｜tool▁calls▁begin｜>", "```json"),
        payload="named",
        opens=("<｜tool▁calls▁begin｜>",),
        section="<｜tool▁calls▁begin｜>",
        section_end="<｜tool▁calls▁end｜>",
        call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        name_end="\n```json\n",
        call_end="\n```<｜tool▁call▁end｜>",
        separator="\n",
    ),
    ToolFormat(
        name="deepseek_v31",
        marks=("<｜tool▁calls▁begin｜>",),
        payload="named",
        opens=("<｜tool▁calls▁begin｜>",),
        section="<｜tool▁calls▁begin｜>",
        section_end="<｜tool▁calls▁end｜>",
        call="<｜tool▁call▁begin｜>",
        name_end="<｜tool▁sep｜>",
        call_end="<｜tool▁call▁end｜>",
    ),
    ToolFormat(
        name="glm45",
        marks=("<arg_key>", "<tool_call>"),
        payload="pairs",
        opens=("<tool_call>",),
        call="<tool_call>",
        name_end="\n",
        call_end="</tool_call>",
        separator="\n",
        pairs=("<arg_key>", "</arg_key>\n", "<arg_value>", "</arg_value>\n"),
    ),
    ToolFormat(
        name="qwen3_coder",
        marks=("<function=", "<parameter="),
        payload="pairs",
        opens=("<tool_call>",),
        call="<tool_call>\n<function=",
        name_end=">\n",
        call_end="</function>\n</tool_call>",
        separator="\n",
        pairs=("<parameter=", ">\n", "", "\n</parameter>\n"),
    ),
    ToolFormat(
        name="mistral_v11",
        marks=("[TOOL_CALLS]", "[ARGS]"),
        payload="named",
        opens=("[TOOL_CALLS]",),
        call="[TOOL_CALLS]",
        name_end="[ARGS]",
    ),
    ToolFormat(
        name="mistral",
        marks=("[TOOL_CALLS]",),
        opens=("[TOOL_CALLS]",),
        section="[TOOL_CALLS][",
        section_end="]",
        separator=", ",
    ),
    ToolFormat(
        name="hermes",
        marks=("<tool_call>",),
        opens=("<tool_call>",),
        call="<tool_call>\n",
        call_end="\n</tool_call>",
        separator="\n",
    ),
    ToolFormat(name="llama3", marks=("<|python_tag|>",), opens=("<|python_tag|>",), separator="; ", key="parameters"),
    ToolFormat(name="llama3", marks=('"parameters": dictionary',), separator="; ", key="parameters"),
    GENERIC,
)
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
