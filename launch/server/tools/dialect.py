"""A model's dialect: the messages and tools that its chat template supports, and how its outputs are parsed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ....conf.errors import ConfigError
from ....conf.reasoning import Reasoning
from ....conf.sampling import SamplingParams
from ....conf.structured_outputs import StructuredOutputs
from ....models.chat_template import ChatTemplate
from ....models.tokenizer import Detokenizer, Tokenizer
from ..compiler import Task
from ..errors import ApiError
from .call_grammar import call_grammar, either_grammar
from .formats import ReasoningFormat, ToolFormat, reasoning_format, tool_format
from .reader import Reader
from .tool_set import ToolSet

_OFFER = """\
You can call functions. Each line here describes one, with a JSON schema of its parameters:
{tools}
To call functions, write one line of JSON for each call and nothing else: {{"name": NAME, "arguments": {{...}}}}
"""
Messages = Sequence[Mapping[str, Any]]


class Dialect:
    """The tool-call and reasoning formats of a model.

    Args:
        template: the model's chat template, including its named ones.
        tokenizer: the model's tokenizer.
        format: name of the tool-call format; None: detect it from the template.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, format: str | None = None) -> None:
        self.template = template
        self._named = {each: Dialect(each, tokenizer, format) for each in template.named.values()}
        self._tokenizer = tokenizer
        self._format = tool_format(template.source, format)
        self._reasoning = None if self._format.channels else reasoning_format(template.source)
        self._is_plain = not template.reads_tools and "tool_calls" not in template.source

    def pick(self, has_tools: bool, name: str | None) -> Dialect:
        """Return the dialect of the template that `ChatTemplate.pick` chooses for a chat."""
        return self._named.get(self.template.pick(has_tools, name), self)

    def messages(self, messages: Messages, tools: ToolSet | None) -> list[Mapping[str, Any]]:
        """Return the messages of a chat in the template's form.

        For a template without tool support, tools, calls and results become text.
        """
        if "developer" not in self.template.source:
            messages = [{**each, "role": "system"} if each.get("role") == "developer" else each for each in messages]
        if not self._is_plain:
            return list(messages)
        found: list[Mapping[str, Any]] = []
        for each in messages:
            if each.get("role") == "tool":
                text = f"Result of the call {each.get('tool_call_id', '')}:\n{_text(each)}"
                if found and found[-1].get("is_result"):
                    found[-1] = {**found[-1], "content": f"{found[-1]['content']}\n{text}"}
                else:
                    found.append({"role": "user", "content": text, "is_result": True})
            elif calls := each.get("tool_calls"):
                text = "\n".join([*filter(None, [_text(each)]), *(self._call(call) for call in calls)])
                found.append({**each, "content": text, "tool_calls": None})
            else:
                found.append(each)
        if tools is None:
            return found
        offer = _OFFER.format(tools="\n".join(json.dumps(each.as_openai["function"]) for each in tools.functions))
        if found and found[0].get("role") == "system":
            return [{**found[0], "content": f"{_text(found[0])}\n\n{offer}"}, *found[1:]]
        return [{"role": "system", "content": offer}, *found]

    def for_template(self, tools: ToolSet | None) -> list[dict[str, Any]] | None:
        """Return the tools in the template's form; None if it gets none."""
        return None if tools is None or self._is_plain else [each.as_openai for each in tools.functions]

    def speech(self, prompt: str, tools: ToolSet | None, *, shows_reasoning: bool = True) -> Speech | None:
        """Return how the outputs of a prompt are parsed; None: they are plain text."""
        format = self._format if tools is not None or self._format.channels else None
        reasoning = self._reasoning
        if format is None and reasoning is None:
            return None
        in_reasoning = reasoning is not None and prompt.rstrip().endswith(reasoning.begin)
        return Speech(self._tokenizer, format, reasoning, in_reasoning, tools, shows_reasoning)

    def _call(self, call: Mapping[str, Any]) -> str:
        function = call["function"]
        arguments = function.get("arguments") or "{}"
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return f'{{"name": {json.dumps(function["name"])}, "{self._format.key}": {written}}}'


@dataclass(frozen=True, slots=True)
class Speech:
    """How the outputs of one request are parsed, and how sampling is constrained.

    `form` is the required form of an answer that is not a call.
    """

    tokenizer: Tokenizer
    format: ToolFormat | None
    reasoning: ReasoningFormat | None
    in_reasoning: bool
    tools: ToolSet | None
    shows_reasoning: bool
    form: StructuredOutputs | None = None

    @property
    def is_either(self) -> bool:
        """Whether an output must be either calls or an answer of the required form."""
        return self.form is not None and self.tools is not None and self.tools.choice == "auto"

    def reader(self) -> Reader:
        """Return a parser for one output."""
        tools = self.tools
        most = 1 if tools is not None and not tools.is_parallel else None
        schemas = {} if tools is None else tools.schemas
        return Reader(
            self.format,
            self.reasoning,
            in_reasoning=self.in_reasoning,
            tools=schemas,
            most_calls=most,
            is_either=self.is_either,
        )

    def grammar(self, budget: int | None) -> Task[StructuredOutputs] | None:
        """Return a task that builds the grammar of outputs with tools; None: they need no grammar.

        Args:
            budget: maximum reasoning tokens.

        Raises:
            ApiError: the required form of the answer cannot be combined with tools.
        """
        tools, format, form = self.tools, self.format, self.form
        if tools is None:
            return None
        if form is not None and form.after:
            raise ApiError(400, "structured_outputs.after: cannot be combined with tools", param="structured_outputs")
        if format is None or (form is None and not tools.has_grammar):
            return None
        if form is None or not self.is_either:
            return partial(call_grammar, tools=tools, format=format)
        first = format.channels.first if format.channels else None if self.in_reasoning else self.reasoning
        own = partial(either_grammar, tools=tools, format=format, form=form)
        return partial(own, reasoning=first, in_reasoning=self.in_reasoning, budget=budget)

    def params(
        self, params: SamplingParams, wanted: StructuredOutputs | None, budget: int | None = None
    ) -> SamplingParams:
        """Return the sampling parameters of outputs whose calls and reasoning are parsed.

        Args:
            params: the request's sampling parameters.
            wanted: structured outputs to enforce.
            budget: maximum reasoning tokens.

        Raises:
            ApiError: the parameters contradict each other.
        """
        reasoning = None
        if self.reasoning is not None and (wanted is not None or budget is not None):
            begin = "" if self.in_reasoning else self.reasoning.begin
            if not begin or wanted is None or wanted.after:  # else the output has none
                reasoning = Reasoning(begin=begin, end=self.reasoning.end, max_tokens=budget)
        try:
            return replace(params, structured_outputs=wanted, reasoning=reasoning, shown_special_ids=tuple(self._shown))
        except ConfigError as error:
            raise ApiError(400, str(error).removeprefix("sampling."), param="tools") from error

    def call_id(self, answer: str, output: int, call: int, own: str) -> str:
        """Return the id of a call; it is deterministic.

        Args:
            answer: the answer's id.
            output: the output's index.
            call: the call's index in it.
            own: the model's own id of the call, "" if it wrote none.
        """
        if own:
            return own
        digest = hashlib.sha256(f"{answer} {output} {call}".encode()).hexdigest()
        length = self.format.id_length if self.format is not None else 0
        return digest[:length] if length else f"call_{digest[:24]}"

    def reasoning_tokens(self, tokens: Sequence[int]) -> int:
        """Return how many tokens of an output are reasoning."""
        if self.reasoning is None:
            return 0
        detokenizer, text, has_begun = Detokenizer(self.tokenizer, shown=self._shown), "", self.in_reasoning
        count = 0
        for token in tokens:
            text += detokenizer.push(token)
            if has_begun:
                if self.reasoning.end in text:
                    break
                text = text[-len(self.reasoning.end) :]
            elif text.lstrip().startswith(self.reasoning.begin):
                has_begun = True
            elif not self.reasoning.begin.startswith(text.lstrip()):
                break
            count += has_begun
        return count

    @property
    def _shown(self) -> list[int]:
        """The special tokens that the formats contain."""
        texts = [] if self.format is None else list(self.format.texts)
        texts += [] if self.reasoning is None else [self.reasoning.begin, self.reasoning.end]
        encode, is_silent = self.tokenizer.encode, self.tokenizer.is_silent
        return sorted({token for text in texts if text for token in encode(text, False) if is_silent(token)})


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
