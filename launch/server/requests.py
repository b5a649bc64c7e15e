"""The bodies of requests, under OpenAI's names and, for sampling, vLLM's further ones."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect, Request

from ...conf.build import build
from ...conf.errors import ConfigError
from ...conf.sampling import SamplingParams
from ...conf.structured_outputs import StructuredOutputs
from .errors import ApiError

M = TypeVar("M", bound=BaseModel)
_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's


class _Body(BaseModel):
    """Fields that we do not know are ignored, as OpenAI's clients send new ones before servers know them."""

    model_config = ConfigDict(strict=True, extra="ignore")


class StreamOptions(_Body):
    """Options of a streamed answer: whether it ends with the counts of tokens, and whether each event has them."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(_Body):
    """A schema as OpenAI's `response_format` has it. Outputs always follow it, `strict` or not."""

    name: str | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Body):
    """OpenAI's word for structured outputs."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class TextFormat(JsonSchema):
    """The same in `text.format` of `/v1/responses`."""

    type: Literal["text", "json_object", "json_schema"] = "text"


class TextOptions(_Body):
    """The form of the text that `/v1/responses` generates."""

    format: TextFormat | None = None


class SamplingBody(_Body):
    """What both kinds of completion share."""

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
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    def sampling(self, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None = None) -> SamplingParams:
        """Return the sampling parameters of one output.

        Raises:
            ApiError: a value out of its range, or one that this server cannot serve.
        """
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options: only with stream=true", param="stream_options")
        given = {
            name: value
            for name in (
                "temperature",
                "top_p",
                "presence_penalty",
                "frequency_penalty",
                "seed",
                "top_k",
                "min_p",
                "repetition_penalty",
                "min_tokens",
            )
            if (value := getattr(self, name)) is not None
        }
        if given.get("top_k") == -1:  # vLLM's word for all
            given["top_k"] = 0
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        try:
            return SamplingParams(
                max_tokens=max_tokens,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                stop=tuple(stop),
                stop_token_ids=tuple(self.stop_token_ids or ()),
                logit_bias=self.logit_bias,  # type: ignore[arg-type]
                allowed_token_ids=tuple(self.allowed_token_ids or ()),
                bad_words=tuple(self.bad_words or ()),
                include_stop_str_in_output=self.include_stop_str_in_output,
                ignore_eos=self.ignore_eos,
                skip_special_tokens=self.skip_special_tokens,
                structured_outputs=self._structured_outputs(),
                **{"temperature": 1.0} | given,
            )
        except ConfigError as error:
            text = str(error).removeprefix("sampling.")
            raise ApiError(400, text, param=re.split("[=:]", text)[0]) from error

    def truncated(self, prompt: list[int], longest: int) -> list[int]:
        """Return the last `truncate_prompt_tokens` tokens of a prompt; its last `longest` where that is -1.

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
        """Return what the output must match, as OpenAI or vLLM words it.

        Raises:
            ApiError: both do, or a key that vLLM has removed does.
            ConfigError: it is wrong by itself.
        """
        for name in ("json", "regex", "choice", "grammar"):
            if getattr(self, f"guided_{name}") is not None:
                given = f"guided_{name}"
                raise ApiError(400, f'{given}: use structured_outputs={{"{name}": ...}}', param=given)
        asked = self._format
        if self.structured_outputs is None:
            return asked
        if asked is not None:
            raise ApiError(400, "structured_outputs: not together with a format", param="structured_outputs")
        given_keys = {key: value for key, value in self.structured_outputs.items() if value is not None}
        return build(StructuredOutputs, given_keys, "sampling.structured_outputs")

    @property
    def _format(self) -> StructuredOutputs | None:
        """The output's form in OpenAI's words.

        Raises:
            ApiError: the schema is missing.
        """
        form = self.response_format
        if form is None:
            return None
        if form.type == "json_schema" and form.json_schema is None:
            raise ApiError(400, "response_format.json_schema: must be given", param="response_format")
        return _of_format(form.type, form.json_schema)


class CompletionBody(SamplingBody):
    """`POST /v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(_DEFAULT_COMPLETION_TOKENS, ge=0)
    logprobs: int | None = Field(None, ge=0, le=64)
    echo: bool = False
    add_special_tokens: bool = True
    best_of: int | None = None
    suffix: str | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=64)

    @property
    def num_prompt_logprobs(self) -> int | None:
        """How many log-probabilities of each token of the prompt the answer has; None: none."""
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((number for number in asked if number is not None), default=None)

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, also where there is one.

        Raises:
            ApiError: there is none.
        """
        prompt: Any = self.prompt
        if prompt == []:
            raise ApiError(400, "prompt: must not be empty", param="prompt")
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            return [prompt]
        return list(prompt)


class TextPart(_Body):
    """A piece of text in a message of a chat."""

    type: Literal["text"]
    text: str


class InputPart(_Body):
    """A piece of text in the input of `/v1/responses`, written by the user or by the assistant."""

    type: Literal["input_text", "output_text"]
    text: str


class Message(_Body):
    """A message of a chat. Other fields reach the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: str | list[TextPart] | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates read it: its content as one text."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content or [])
        return {**(self.model_extra or {}), "role": self.role, "content": text}


class ChatBody(SamplingBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=64)
    add_special_tokens: bool = False
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class InputMessage(Message):
    """A message of a response's input. Its parts have types of their own."""

    type: Literal["message"] = "message"
    content: str | list[InputPart]  # type: ignore[assignment]


class ResponseBody(SamplingBody):
    """`POST /v1/responses`, without state: each request brings the whole conversation."""

    input: str | Annotated[list[InputMessage], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    previous_response_id: str | None = None
    tools: list[Any] | None = None
    text: TextOptions | None = None

    @property
    def _format(self) -> StructuredOutputs | None:
        form = self.text.format if self.text is not None else None
        return None if form is None else _of_format(form.type, form)

    @property
    def messages(self) -> list[Message]:
        """The conversation as a chat, with the instructions first."""
        found = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        first = [Message(role="system", content=self.instructions)] if self.instructions else []
        return [*first, *found]


class TokenizeBody(_Body):
    """`POST /tokenize`: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeBody(_Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[int]


def _of_format(kind: str, schema: JsonSchema | None) -> StructuredOutputs | None:
    if kind == "json_schema" and schema is not None:
        return StructuredOutputs(json=schema.schema_)
    return StructuredOutputs(json_object=True) if kind == "json_object" else None


def each_output(params: SamplingParams, n: int) -> list[SamplingParams]:
    """Return the parameters of each of `n` outputs: alike, but for their seeds."""
    if params.seed is None:
        return [params] * n
    return [replace(params, seed=params.seed + index) for index in range(n)]


async def read(request: Request, kind: type[M]) -> M:
    """Read the body of a request.

    Raises:
        ApiError: it is no JSON, or not the body that this path takes; it names the first field that is wrong. Or the
            client went before it was complete.
    """
    try:
        return kind.model_validate(msgspec.json.decode(await request.body()))
    except ClientDisconnect as error:
        raise ApiError(408, "the connection ended before the body was complete") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        raise ApiError(400, f"{path or 'body'}: {first['msg']}", param=path or None) from error
