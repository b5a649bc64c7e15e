"""Request bodies, with OpenAI's fields and vLLM's additional sampling fields."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ...conf.build import build
from ...conf.errors import ConfigError
from ...conf.sampling import SamplingParams
from ...conf.structured_outputs import StructuredOutputs
from ...models.chat_template import checked_messages
from ...runtime.engine.intake import PromptTooLong
from .body import Body
from .errors import ApiError, too_long
from .response_input import hosted_items, response_messages
from .tool_bodies import (
    AllowedTools,
    AnyChatChoice,
    AnyChatTool,
    AnyResponseChoice,
    AnyResponseTool,
    ChatAllowedTools,
    ChatTool,
    ChatToolChoice,
    HostedTool,
    ResponseNamespace,
    ResponseTool,
    ResponseToolChoice,
)
from .tools.hosted import refusal
from .tools.tool_set import Function, ToolSet, tool_set

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
_SAME = (  # fields with the names of sampling parameters
    *("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens"),
    *("stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words", "include_stop_str_in_output", "ignore_eos"),
    *("skip_special_tokens", "seed", "top_k"),
)
_LOGPROBS = "message.output_text.logprobs"  # in `include` of `/v1/responses`
Defaults = Mapping[str, Any] | None  # values of fields that a body lacks
_HALF = 1 << 63  # of all seeds


class StreamOptions(Body):
    """Options of a stream: whether the last event, or each event, has token usage."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Body):
    """A JSON schema in OpenAI's `response_format`. It is always enforced, `strict` or not."""

    name: str | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """Structured outputs in OpenAI's form."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")  # of `json_object`, as llama.cpp's clients send it


class TextFormat(JsonSchema):
    """Structured outputs in `text.format` of `/v1/responses`."""

    type: Literal["text", "json_object", "json_schema"] = "text"


class TextOptions(Body):
    """Text options of `/v1/responses`."""

    format: TextFormat | None = None


class SamplingBody(Body):
    """Base class of bodies that generate outputs."""

    prompt_field: ClassVar[str] = "prompt"  # the field with the model's input
    format_field: ClassVar[str] = "response_format"  # the field with OpenAI's output format

    model: str | None = None
    n: int = Field(1, ge=1, le=128)
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    seed: int | None = None
    user: str | None = None
    cache_salt: str | None = Field(None, min_length=1)
    priority: int = Field(0, ge=-(1 << 31), lt=1 << 31)
    deadline_ms: float | None = Field(None, gt=0, allow_inf_nan=False)
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None

    @property
    def length_field(self) -> str:
        """The field that limits the output's length."""
        names = ("max_output_tokens", "max_completion_tokens")
        return next((name for name in names if getattr(self, name, None) is not None), "max_tokens")

    @property
    def stops(self) -> Sequence[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def sampling(
        self, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None = None, defaults: Defaults = None
    ) -> SamplingParams:
        """Return the sampling parameters of one output; `defaults` apply to fields that the body lacks.

        Raises:
            ApiError: a value is out of range or not supported.
        """
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options: requires stream=true", param="stream_options")
        given = {name: value for name in _SAME if (value := getattr(self, name)) is not None}
        if self.seed == -1:  # vLLM: random seed
            given["seed"] = None
        try:
            return SamplingParams(
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                stop=tuple(self.stops),
                structured_outputs=self._structured_outputs(),
                **{"temperature": 1.0} | dict(defaults or {}) | given | {"max_tokens": max_tokens},
            )
        except ConfigError as error:
            raise self.refusal(error) from error

    def refusal(self, error: ConfigError) -> ApiError:
        """Convert an intake error to an `ApiError` that names the request's field."""
        text = str(error)
        if isinstance(error, PromptTooLong):
            return too_long(error.prompt, error.output, error.limit, self.prompt_field, self.length_field, text)
        if (named := re.match(r"sampling\.(\w+)", text)) is None:
            return ApiError(400, text, param=self.prompt_field)
        field, text = named[1].replace("bad_words_ids", "bad_words"), text.replace("sampling.", "")
        if self.structured_outputs is None:
            text = re.sub(r"structured_outputs(\.\w+)?", self.grammar_field, text, count=1)
            field = self.grammar_field if field == "structured_outputs" else field
        return ApiError(400, text, param=field)

    def truncated(self, prompt: list[int], longest: int) -> list[int]:
        """Return the last `truncate_prompt_tokens` tokens of a prompt; the last `longest` tokens if that is -1.

        Raises:
            ApiError: it is 0.
        """
        most = self.truncate_prompt_tokens
        if most is None:
            return prompt
        if most == 0:
            raise ApiError(400, "truncate_prompt_tokens: must be 1 or more, or -1", param="truncate_prompt_tokens")
        return prompt[-(longest if most == -1 else most) :]

    def _structured_outputs(self) -> StructuredOutputs | None:
        """Return the structured outputs, given in OpenAI's or vLLM's form.

        Raises:
            ApiError: both forms are given.
            ConfigError: they are invalid.
        """
        asked = self._format
        if self.structured_outputs is None:
            return asked
        if asked is not None:
            raise ApiError(400, "structured_outputs: cannot be combined with a format", param="structured_outputs")
        given_keys = {key: value for key, value in self.structured_outputs.items() if value is not None}
        return build(StructuredOutputs, given_keys, "sampling.structured_outputs")

    @property
    def grammar_field(self) -> str:
        """The field that determines an output's grammar, apart from `structured_outputs`."""
        return self.format_field

    @property
    def _format(self) -> StructuredOutputs | None:
        """The output format in OpenAI's form.

        Raises:
            ApiError: the schema is missing.
        """
        form = self.response_format
        if form is None:
            return None
        if form.type == "json_schema" and form.json_schema is None:
            raise ApiError(400, "response_format.json_schema: required", param="response_format.json_schema")
        return form_of(form.type, form.schema_ if form.json_schema is None else form.json_schema.schema_)


class CompletionBody(SamplingBody):
    """`POST /v1/completions`."""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[int], Field(fail_fast=True)]
        | Annotated[list[Annotated[list[int], Field(fail_fast=True)]], Field(fail_fast=True)]
    )
    max_tokens: int | None = Field(_DEFAULT_COMPLETION_TOKENS, ge=0)
    logprobs: int | None = Field(None, ge=0, le=64)
    echo: bool = False
    add_special_tokens: bool = True
    prompt_logprobs: int | None = Field(None, ge=0, le=64)

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of log-probabilities per prompt token in the answer; None: none."""
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((number for number in asked if number is not None), default=None)

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list.

        Raises:
            ApiError: there is none.
        """
        prompt: Any = self.prompt
        if prompt == []:
            raise ApiError(400, "prompt: must not be empty", param="prompt")
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            return [prompt]
        return list(prompt)


class Templated(Body):
    """Fields for the chat template, apart from the messages."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None

    @property
    def effort(self) -> str | None:
        """The reasoning effort."""
        return self.reasoning_effort

    @property
    def further(self) -> dict[str, Any]:
        """Additional variables for the chat template."""
        own: dict[str, Any] = {"documents": self.documents, "reasoning_effort": self.effort}
        own |= {"enable_thinking": False} if self.effort == "none" else {}
        return {name: value for name, value in own.items() if value is not None} | (self.chat_template_kwargs or {})


class Offers(SamplingBody):
    """Base class of bodies with tools, including hosted tools, which this server does not have."""

    tools: list[Any] | None = None

    @property
    def tool_set(self) -> ToolSet | None:
        """The tools that may be called; None: none.

        Raises:
            ApiError: a tool is invalid.
        """
        raise NotImplementedError

    @property
    def hosted(self) -> dict[str, str]:
        """The types of hosted tools, by name, or by type if they have no name."""
        return {each.name or each.type: each.type for each in self.tools or () if isinstance(each, HostedTool)}

    @property
    def ignored_tools(self) -> list[str]:
        """The types of hosted tools in the request, which are ignored."""
        return list(dict.fromkeys(self.hosted.values()))

    @property
    def grammar_field(self) -> str:
        """See `SamplingBody.grammar_field`: `tools` if a call is required or there is no other format."""
        tools = self.tool_set
        return (
            "tools" if tools is not None and (tools.choice == "required" or self._format is None) else self.format_field
        )

    def offered(self, given: dict[str, Function], choice: object, is_parallel: bool) -> ToolSet | None:
        """Return the tools that may be called, like `tool_set`, given OpenAI's form of the choice.

        Raises:
            ApiError: a tool is invalid, or the choice forces a tool that this server does not have.
        """
        some = choice.allowed_tools if isinstance(choice, ChatAllowedTools) else choice
        chosen = some.tools if isinstance(some, AllowedTools) else [choice]
        hosted = [each.type for each in chosen if isinstance(each, HostedTool)]
        if wrong := [kind for kind in hosted if kind not in self.hosted.values()]:
            found = f", not {wrong[0]!r}" if wrong[0] else ""
            text = f"tool_choice.type: must be function, allowed_tools or the type of one of the tools{found}"
            raise ApiError(400, text, param="tool_choice.type")
        names = [each.name for each in chosen if isinstance(each, ChatToolChoice | ResponseToolChoice)]
        if isinstance(some, AllowedTools):
            kinds = dict(zip(hosted, hosted, strict=True))
            return tool_set(given, some.mode, None, is_parallel, kinds, frozenset(names))
        if hosted:
            raise refusal(hosted[0])
        return tool_set(given, choice, next(iter(names), None), is_parallel, self.hosted)


class Reasons(Body):
    """Options of reasoning and parallel tool calls."""

    include_reasoning: bool = True
    thinking_token_budget: int | None = Field(None, ge=0)
    parallel_tool_calls: bool = True


class ChatBody(Offers, Templated, Reasons):
    """`POST /v1/chat/completions`. Additional keys of messages are passed to the chat template."""

    prompt_field = "messages"

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=64)
    add_special_tokens: bool = False
    tools: list[AnyChatTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | AnyChatChoice | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Number of log-probabilities per token; None: none. Raises `ApiError` if `top_logprobs` lacks `logprobs`."""
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs: requires logprobs=true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def chat(self) -> Sequence[dict[str, Any]]:
        """The messages.

        Raises:
            ConfigError: a message is invalid.
        """
        return checked_messages(self.messages)

    @property
    def tool_set(self) -> ToolSet | None:
        """The tools that may be called; None: none.

        Raises:
            ApiError: a tool is invalid.
        """
        return self.offered(_functions(self.tools), self.tool_choice, self.parallel_tool_calls)


class ReasoningOptions(Body):
    """Options of reasoning in `/v1/responses`."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseBody(Offers, Templated, Reasons):
    """`POST /v1/responses`. It is stateless: each request contains the whole conversation."""

    prompt_field = "input"
    format_field = "text.format"
    not_computed = frozenset(("n", "response_format", "return_token_ids", "return_tokens_as_token_ids"))

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    max_output_tokens: int | None = Field(None, ge=1)
    top_logprobs: int | None = Field(None, ge=0, le=64)
    include: list[str] | None = None
    text: TextOptions | None = None
    tools: list[AnyResponseTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | AnyResponseChoice | None = None
    reasoning: ReasoningOptions | None = None

    @property
    def effort(self) -> str | None:
        """See `Templated.effort`."""
        return self.reasoning.effort if self.reasoning is not None else self.reasoning_effort

    @property
    def tool_set(self) -> ToolSet | None:
        """See `ChatBody.tool_set`."""
        given: dict[str, Function] = {}
        for number, tool in enumerate(self.tools or ()):
            if isinstance(tool, ResponseTool):
                given[f"tools[{number}]"] = tool.function
            if not isinstance(tool, ResponseNamespace):
                continue
            for inner, each in enumerate(tool.tools):
                function = replace(each.function, name=f"{tool.name}.{each.name}", namespace=tool.name)
                given[f"tools[{number}].tools[{inner}]"] = function
        return self.offered(given, self.tool_choice, self.parallel_tool_calls)

    @property
    def ignored_tools(self) -> list[str]:
        """See `Offers.ignored_tools`; also the input items of such tools."""
        return list(dict.fromkeys([*super().ignored_tools, *hosted_items(self.input)]))

    @property
    def num_logprobs(self) -> int | None:
        """Number of log-probabilities per output token; None: none."""
        return (self.top_logprobs or 0) if self.top_logprobs or _LOGPROBS in (self.include or ()) else None

    @property
    def _format(self) -> StructuredOutputs | None:
        form = self.text.format if self.text is not None else None
        if form is not None and form.type == "json_schema" and "schema_" not in form.model_fields_set:
            raise ApiError(400, "text.format.schema: required", param="text.format.schema")
        return None if form is None else form_of(form.type, form.schema_)

    @property
    def chat(self) -> Sequence[dict[str, Any]]:
        """The instructions and the input as chat messages.

        Raises:
            ApiError, ConfigError: an input item is invalid.
        """
        first = [{"role": "system", "content": self.instructions}] if self.instructions else []
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        return [*first, *checked_messages(response_messages(items), "input")]


class TokenizeBody(Templated):
    """`POST /tokenize`: a prompt, or the messages of a chat with their tools."""

    prompt_field: ClassVar[str] = "messages"

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[AnyChatTool] | None = None
    add_special_tokens: bool = True

    @property
    def chat(self) -> Sequence[dict[str, Any]]:
        """See `ChatBody.chat`."""
        return checked_messages(self.messages)

    @property
    def tool_set(self) -> ToolSet | None:
        """See `ChatBody.tool_set`."""
        return tool_set(_functions(self.tools), None)


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]


def _functions(tools: Sequence[object] | None) -> dict[str, Function]:
    """Return the functions among a chat's tools, by their places in the body."""
    own = [(number, tool) for number, tool in enumerate(tools or ()) if isinstance(tool, ChatTool)]
    return {f"tools[{number}].function": tool.function.function for number, tool in own}


def form_of(kind: str, schema: dict[str, Any] | None) -> StructuredOutputs | None:
    """Return the structured outputs of a response format; None: unconstrained text."""
    if kind == "json_schema" or (kind == "json_object" and schema):
        return StructuredOutputs(json=schema or {})
    return StructuredOutputs(json_object=True) if kind == "json_object" else None


def each_output(params: SamplingParams, n: int) -> list[SamplingParams]:
    """Return the parameters of each of `n` outputs, which differ only in their 64-bit seeds."""
    if params.seed is None:
        return [params] * n
    first = params.seed + _HALF
    return [replace(params, seed=(first + index) % (2 * _HALF) - _HALF) for index in range(n)]
