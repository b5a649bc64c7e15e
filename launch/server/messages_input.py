"""The body of Anthropic's `POST /v1/messages`, and its conversion to chat messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from ...conf.structured_outputs import StructuredOutputs
from ...models.chat_template import checked_messages
from .body import Body
from .errors import ApiError, given
from .requests import Offers, TextFormat, form_of
from .tool_bodies import Hosted
from .tools.hosted import is_block, kind_among, no_message
from .tools.tool_set import Function, ToolSet, tool_set

_MODEL = ("assistant",)
_ROLES = {  # roles whose messages may have a block, by block type
    **{"text": ("user", "assistant", "system"), "tool_result": ("user",), "tool_use": _MODEL},
    **{"thinking": _MODEL, "redacted_thinking": _MODEL},
}
_BILLING = re.compile(r"\Ax-anthropic-billing-header:.*\n*")  # changes with each request and defeats prefix caching
_CHOICES = {"any": "required", "tool": "required"}  # in OpenAI's words


class MessageTool(Body):
    """A client tool."""

    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool = False


class MessageToolChoice(Body):
    """The tool choice."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Body):
    """Whether the model reasons, and the maximum number of reasoning tokens."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1)


class OutputConfig(Body):
    """The output format and the reasoning effort."""

    effort: str | None = None
    format: TextFormat | None = None


class MessagesBody(Offers):
    """`POST /v1/messages`, with Anthropic's fields and the sampling fields of the other paths."""

    prompt_field = "messages"
    format_field = "output_config.format"
    not_computed = frozenset(
        ("n", "response_format", "return_token_ids", "return_tokens_as_token_ids", "stop", "stream_options")
    )

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    max_tokens: int | None = Field(None, ge=1)
    stop_sequences: list[str] | None = None
    tools: (
        list[
            Annotated[
                Annotated[MessageTool, Tag("<custom>")] | Annotated[MessageTool, Tag("<function>")] | Hosted,
                Discriminator(kind_among("custom", "function")),
            ]
        ]
        | None
    ) = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: TextFormat | None = None  # legacy place of `output_config.format`
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def stops(self) -> Sequence[str]:
        """See `SamplingBody.stops`."""
        return self.stop_sequences or ()

    @property
    def include_reasoning(self) -> bool:
        """Whether reasoning is part of the answer."""
        return self.thinking is not None and self.thinking.type != "disabled"

    @property
    def thinking_token_budget(self) -> int | None:
        """Maximum number of reasoning tokens."""
        return self.thinking.budget_tokens if self.thinking is not None else None

    @property
    def continue_final_message(self) -> bool:
        """Whether the model continues the last message, because it is the assistant's."""
        return bool(self.chat[-1]["role"] == "assistant")

    @property
    def add_generation_prompt(self) -> bool:
        """Whether the model starts a new message."""
        return not self.continue_final_message

    @property
    def further(self) -> dict[str, Any]:
        """Additional variables for the chat template."""
        effort = self.output_config.effort if self.output_config is not None else None
        own: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
        return own | {"enable_thinking": self.include_reasoning} | (self.chat_template_kwargs or {})

    @property
    def tool_set(self) -> ToolSet | None:
        """The tools that may be called; None: none.

        Raises:
            ApiError: a tool is invalid.
        """
        offered, choice = {}, self.tool_choice
        for number, each in enumerate(self.tools or ()):
            if not isinstance(each, MessageTool):
                continue
            offered[f"tools[{number}]"] = Function(each.name, each.description, each.input_schema, each.strict)
        if choice is None:
            return tool_set(offered, None, hosted=self.hosted)
        if choice.type == "tool" and choice.name is None:
            raise ApiError(400, "tool_choice.name: required", param="tool_choice.name")
        name, word = choice.name if choice.type == "tool" else None, _CHOICES.get(choice.type, choice.type)
        is_parallel, word = not choice.disable_parallel_tool_use, "auto" if name else word
        return tool_set(offered, word, name, is_parallel, self.hosted)

    @property
    def ignored_tools(self) -> list[str]:
        """See `Offers.ignored_tools`; also the message blocks of such tools."""
        blocks = [
            each for message in self.messages if isinstance(found := message.get("content"), list) for each in found
        ]
        kinds = [str(each.get("type")) for each in blocks if isinstance(each, dict)]
        return list(dict.fromkeys([*super().ignored_tools, *filter(is_block, kinds)]))

    @property
    def _format(self) -> StructuredOutputs | None:
        form = (self.output_config.format if self.output_config is not None else None) or self.output_format
        return None if form is None else form_of(form.type, form.schema_)

    @cached_property
    def chat(self) -> list[dict[str, Any]]:
        """The system prompt and the messages as chat messages.

        Raises:
            ApiError, ConfigError: a block has an unsupported type or lacks a key, or the last calls have no results.
        """
        system = _BILLING.sub("", "\n\n".join(_texts(self.system, "system"))) if self.system else ""
        found: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        for number, message in enumerate(self.messages):
            found += _message(message, f"messages[{number}]")
        if len(found) == bool(system):
            raise no_message("messages")
        if calls := found[-1].get("tool_calls"):
            ids = ", ".join(call["id"] for call in calls)
            text = (  # Anthropic's
                f"`tool_use` ids were found without `tool_result` blocks immediately after: {ids}. Each `tool_use` "
                "block must have a corresponding `tool_result` block in the next message."
            )
            raise ApiError(400, f"messages[{len(self.messages) - 1}]: {text}", param="messages")
        return checked_messages(found)


def _message(message: dict[str, Any], where: str) -> Iterator[dict[str, Any]]:
    """Convert a message to chat messages. Tool results become separate messages and come first."""
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES["text"]:
        raise ApiError(400, f"{where}.role: must be user, assistant or system", param=f"{where}.role")
    text, calls, reasoning = [], [], []
    for number, block in enumerate(_blocks(content, f"{where}.content")):
        place, kind = f"{where}.content[{number}]", block.get("type")
        if is_block(str(kind)):
            continue
        if role not in _ROLES.get(str(kind), ()):
            raise ApiError(400, f"{place}: {kind} blocks are not supported in {role} messages", param=place)
        if kind == "tool_result":
            result = "\n".join(_texts(block.get("content") or "", f"{place}.content"))
            yield {"role": "tool", "tool_call_id": given(block, "tool_use_id", str, place), "content": result}
        elif kind == "tool_use":
            arguments = json.dumps(given(block, "input", dict, place), ensure_ascii=False)
            function = {"name": given(block, "name", str, place), "arguments": arguments}
            calls.append({"id": given(block, "id", str, place), "type": "function", "function": function})
        elif kind == "text":
            text.append(given(block, "text", str, place))
        elif kind == "thinking":
            reasoning.append(given(block, "thinking", str, place))
    if text or calls or reasoning or not content:
        found: dict[str, Any] = {"role": role, "content": "\n".join(text) if text or not calls else None}
        found |= {"tool_calls": calls} if calls else {}
        yield found | ({"reasoning_content": "\n".join(reasoning)} if reasoning else {})


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise ApiError(400, f"{where}: must be a string or a list of blocks", param=where)
    return content


def _texts(content: Any, where: str) -> list[str]:
    """Return the texts of text-only content."""
    found = []
    for number, block in enumerate(_blocks(content, where)):
        if block.get("type") != "text":
            place = f"{where}[{number}]"
            raise ApiError(400, f"{place}: {block.get('type')} blocks are not supported here; use text", param=place)
        found.append(given(block, "text", str, f"{where}[{number}]"))
    return found
