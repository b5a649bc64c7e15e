"""The paths of the API that answer with outputs: how each reads its body."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...conf.errors import ConfigError
from ...conf.sampling import SamplingParams
from ...models.chat_template import ChatTemplateError
from ...models.grammar import Grammars
from ...runtime.engine.intake import PromptTooLong
from .answers import Asked, ChatAnswer, CompletionAnswer
from .compiler import LONGEST_WRITING_S
from .engine_client import Call
from .errors import ApiError, too_long
from .messages import MessageAnswer
from .messages_input import MessagesBody
from .requests import ChatBody, CompletionBody, Reasons, ResponseBody, SamplingBody, TokenizeBody
from .responses import ResponseAnswer
from .service import Service
from .tools.dialect import Dialect, Speech
from .tools.tool_set import ToolSet

Chat = ChatBody | ResponseBody | MessagesBody
_LONG_TEXT = 10_000  # characters; longer ones are encoded in a thread, so that no other answer waits


@dataclass(frozen=True, slots=True)
class Route:
    """A path of the API that answers with outputs. `ask` reads its body, and raises `ApiError` where that is wrong."""

    path: str
    does: str  # in the OpenAPI document
    body: type[SamplingBody]
    ask: Callable[[Service, Any], Awaitable[Asked]]


async def _ask_completion(service: Service, body: CompletionBody) -> Asked:
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens: must be 1 or more, or 0 with echo", param="max_tokens")
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError(400, "prompt_logprobs: not in a stream", param="prompt_logprobs")
    prompts = await _encode(service, body, body.prompts, body.max_tokens, body.add_special_tokens)
    room = _room(service, body, prompts, body.max_tokens)
    params = body.sampling(max(1, room), body.logprobs, body.num_prompt_logprobs, service.sampling)
    tokenizer = service.intake.tokenizer
    echoes = None
    if body.echo:
        is_cut = body.truncate_prompt_tokens is not None
        echoes = [
            tokenizer.decode(ids) if is_cut or not isinstance(p, str) else p
            for p, ids in zip(body.prompts, prompts, strict=True)
        ]
    return Asked(body, prompts, params, CompletionAnswer(service.model, prompts, body, tokenizer, echoes))


async def _ask_chat(service: Service, body: ChatBody) -> Asked:
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    prompts, speech, params = await _ask_turn(service, body, asked, body.num_logprobs, body.add_special_tokens)
    return Asked(body, prompts, params, ChatAnswer(service.model, prompts, body, service.intake.tokenizer, speech))


async def _ask_response(service: Service, body: ResponseBody) -> Asked:
    prompts, speech, params = await _ask_turn(service, body, body.max_output_tokens, body.num_logprobs)
    said = body.model_dump(include={"instructions", "max_output_tokens", "metadata"})
    said |= body.model_dump(include={"tools", "tool_choice", "parallel_tool_calls", "reasoning"}, exclude_none=True)
    if "tools" in said:
        said["tools"] = [each for each in said["tools"] if each["type"] not in body.ignored_tools]
    said |= {"temperature": params.temperature, "top_p": params.top_p}
    answer = ResponseAnswer(service.model, prompts, body, service.intake.tokenizer, speech, asked=said)
    return Asked(body, prompts, params, answer)


async def _ask_message(service: Service, body: MessagesBody) -> Asked:
    if body.max_tokens is None:
        raise ApiError(400, "max_tokens: must be given", param="max_tokens")
    prompts, speech, params = await _ask_turn(service, body, body.max_tokens, None)
    return Asked(body, prompts, params, MessageAnswer(service.model, prompts, body, service.intake.tokenizer, speech))


MESSAGES = Route("/v1/messages", "Answer Anthropic's messages", MessagesBody, _ask_message)
_OTHERS = (
    Route("/v1/completions", "Continue one or several prompts", CompletionBody, _ask_completion),
    Route("/v1/chat/completions", "Answer the messages of a chat", ChatBody, _ask_chat),
    Route("/v1/responses", "Answer a conversation", ResponseBody, _ask_response),
)
ROUTES = {route.path: route for route in (*_OTHERS, MESSAGES)}


async def check(service: Service, asked: Asked) -> Asked:
    """Check a request against the model and the engine; return it with its `bad_words` as token ids.

    Raises:
        ApiError: it does not fit, or its structured outputs do not compile.
    """
    params, intake = asked.params, service.intake
    try:
        if params.structured_outputs is not None:
            await service.compiler.check(params.structured_outputs)
        if params.bad_words:
            params = await asyncio.to_thread(intake.resolve, params)
        for number, prompt in enumerate(asked.prompts):
            intake.check(number, prompt, params)
        is_met = True
        if params.limits and (wanted := params.structured_outputs) is not None:
            is_met = await service.compiler.ask(partial(Grammars.admits, wanted=wanted, params=params), wanted.kind)
        intake.check_limits(params, is_met)
    except ConfigError as error:
        raise asked.body.refusal(error) from error
    return replace(asked, params=params)


def check_model(service: Service, name: str | None) -> None:
    """Check the model that a body names.

    Raises:
        ApiError: it is none of ours.
    """
    if name is not None and name not in service.names and not service.config.takes_any_name:
        raise ApiError(
            404,
            f"The model `{name}` does not exist; this server has {', '.join(f'`{each}`' for each in service.names)}.",
            param="model",
            code="model_not_found",
            anthropic=f"model: {name}",
        )


def set_standing(call: Call, service: Service, holder: str, body: SamplingBody) -> None:
    """Set whose share of the engine a call of a key's `holder` takes, the salt of its KV blocks, and its priority."""
    config = service.config
    call.user = holder if holder and config.share_by == "key" else body.user or ""
    # The length first, so that no salt of a client reads like one of a key.
    salt = body.cache_salt or ""
    call.cache_salt = f"{len(holder)} {holder} {salt}" if config.isolate_keys else salt
    call.priority = body.priority


async def _encode(
    service: Service, body: SamplingBody, prompts: Sequence[str | list[int]], max_tokens: int | None, add_special: bool
) -> list[list[int]]:
    """Return the token ids of prompts, as far as the body wants them with `max_tokens` output tokens behind them."""
    field = body.prompt_field
    encoded = [p if not isinstance(p, str) else await encode_text(service, p, add_special, field) for p in prompts]
    longest = max(1, service.max_model_len - max(1, max_tokens or 1))
    return [body.truncated(prompt, longest) for prompt in encoded]


async def encode_text(service: Service, text: str, add_special: bool, field: str) -> list[int]:
    """Return the token ids of the text that a field holds.

    Raises:
        ApiError: it is no text, or far too long.
    """
    try:
        service.intake.check_text(0, text)
        encode: Callable[[str, bool], list[int]] = service.intake.tokenizer.encode
        if len(text) <= _LONG_TEXT:
            return encode(text, add_special)
        return await asyncio.to_thread(encode, text, add_special)
    except PromptTooLong as error:
        raise too_long(error.prompt, 1, error.limit, field, field, str(error)) from error
    except ConfigError as error:
        raise ApiError(400, str(error), param=field) from error


async def _ask_turn(
    service: Service, body: Chat, max_tokens: int | None, logprobs: int | None, special: bool = False
) -> tuple[list[list[int]], Speech | None, SamplingParams]:
    """Return the prompt of a chat as token ids, how its outputs are read, and how they are sampled."""
    prompts, speech = await ask_messages(service, body, max_tokens, special)
    params = body.sampling(_room(service, body, prompts, max_tokens), logprobs, defaults=service.sampling)
    if speech is not None:
        wanted = params.structured_outputs
        speech = replace(speech, form=wanted)
        if (task := speech.grammar(body.thinking_token_budget)) is not None:
            try:
                wanted = await service.compiler.ask(task, "grammar", LONGEST_WRITING_S)
            except ConfigError as error:
                text = str(error).removeprefix("sampling.structured_outputs.").removeprefix("grammar: ")
                raise ApiError(400, f"tools: {text}", param="tools") from error
        params = speech.params(params, wanted, body.thinking_token_budget)
    return prompts, speech, params


async def ask_messages(
    service: Service, body: Chat, max_tokens: int | None, special: bool = False
) -> tuple[list[list[int]], Speech | None]:
    """Return the prompt of a chat as token ids, and how its outputs are read."""
    tools = body.tool_set
    text, dialect = await render(service, body, tools)
    speech = dialect.speech(text, tools, shows_reasoning=body.include_reasoning)
    has_end = speech is not None and speech.reasoning is not None
    if isinstance(body, Reasons) and body.thinking_token_budget is not None and not has_end:
        name = "thinking_token_budget"
        raise ApiError(400, f"{name}: this model's chat template has no reasoning that has an end", param=name)
    return await _encode(service, body, [text], max_tokens, special), speech


async def render(service: Service, body: Chat | TokenizeBody, tools: ToolSet | None) -> tuple[str, Dialect]:
    """Return the prompt of a chat, as its body wants it, with `tools`, and the dialect of its template.

    Raises:
        ApiError: a message is wrong, or the model has no chat template, or it refuses the messages.
    """
    async with service.rendering:  # chats that wait for others hold no thread
        return await asyncio.to_thread(_render, service, body, tools)


def _render(service: Service, body: Chat | TokenizeBody, tools: ToolSet | None) -> tuple[str, Dialect]:
    field = body.prompt_field
    if service.dialect is None:
        raise ApiError(
            400,
            "this model has no chat template; use /v1/completions, or serve a chat model, as gapless serve smollm2",
            param=field,
        )
    try:
        dialect = service.dialect.pick(tools is not None, body.chat_template)
        continues = body.continue_final_message
        further: dict[str, Any] = {"tools": dialect.for_template(tools)} | body.further
        read = dialect.messages(body.chat, tools)
        text = dialect.template.render(read, body.add_generation_prompt, further, continue_final_message=continues)
        return text, dialect
    except ConfigError as error:
        raise ApiError(400, str(error), param=str(error).partition(":")[0]) from error
    except RecursionError as error:
        raise ApiError(400, f"{field}, tools: nested too deep", param="tools") from error
    except ChatTemplateError as error:
        names = ("continue_final_message", "chat_template")
        named = next((name for name in names if str(error).startswith(f"{name}:")), field)
        raise ApiError(400, str(error), param=named) from error


def _room(service: Service, body: SamplingBody, prompts: Sequence[Sequence[int]], asked: int | None) -> int:
    """Return the most output tokens: those asked for, else those of generation_config.json, as far as there is room.

    Raises:
        ApiError: the context cannot hold the prompt and the output.
    """
    context = service.max_model_len
    longest = max((len(prompt) for prompt in prompts), default=0)
    left = context - longest
    if left < 1 or (asked is not None and asked > left):
        raise too_long(longest, asked or 1, context, body.prompt_field, body.length_field)
    return min(left, service.sampling.get("max_tokens", left)) if asked is None else asked
