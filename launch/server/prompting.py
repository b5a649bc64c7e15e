"""Prompts of generation requests: rendered, tokenized, truncated, and fitted to the context."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ...conf.errors import ConfigError
from ...conf.sampling import SamplingParams
from ...models.chat_template import ChatTemplateError
from ...runtime.engine.intake import PromptTooLong
from .compiler import LONGEST_WRITING_S
from .errors import ApiError, too_long
from .messages_input import MessagesBody
from .requests import ChatBody, Reasons, ResponseBody, SamplingBody, TokenizeBody
from .service import Service
from .tools.dialect import Dialect, Speech
from .tools.tool_set import ToolSet

Chat = ChatBody | ResponseBody | MessagesBody
_LONG_TEXT = 10_000  # characters; longer texts are tokenized in a thread, so that they do not block other answers


async def encode_prompts(
    service: Service, body: SamplingBody, prompts: Sequence[str | list[int]], max_tokens: int | None, add_special: bool
) -> list[list[int]]:
    """Return the token ids of prompts, truncated as the body asks, leaving room for `max_tokens` output tokens."""
    field = body.prompt_field
    encoded = [p if not isinstance(p, str) else await encode_text(service, p, add_special, field) for p in prompts]
    longest = max(1, service.max_model_len - max(1, max_tokens or 1))
    return [body.truncated(prompt, longest) for prompt in encoded]


async def encode_text(service: Service, text: str, add_special: bool, field: str) -> list[int]:
    """Return the token ids of a field's text.

    Raises:
        ApiError: it is not valid text, or far too long.
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


async def ask_turn(
    service: Service, body: Chat, max_tokens: int | None, logprobs: int | None, special: bool = False
) -> tuple[list[list[int]], Speech | None, SamplingParams]:
    """Return a chat's prompt as token ids, how its outputs are parsed, and the sampling parameters."""
    prompts, speech = await ask_messages(service, body, max_tokens, special)
    params = body.sampling(output_room(service, body, prompts, max_tokens), logprobs, defaults=service.sampling)
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
    """Return a chat's prompt as token ids, and how its outputs are parsed."""
    tools = body.tool_set
    text, dialect = await render(service, body, tools)
    speech = dialect.speech(text, tools, shows_reasoning=body.include_reasoning)
    has_end = speech is not None and speech.reasoning is not None
    if isinstance(body, Reasons) and body.thinking_token_budget is not None and not has_end:
        name = "thinking_token_budget"
        raise ApiError(400, f"{name}: this model's chat template has no end marker of reasoning", param=name)
    return await encode_prompts(service, body, [text], max_tokens, special), speech


async def render(service: Service, body: Chat | TokenizeBody, tools: ToolSet | None) -> tuple[str, Dialect]:
    """Return the rendered prompt of a chat with `tools`, and the dialect of its template.

    Raises:
        ApiError: a message is invalid, the model has no chat template, or the template rejects the messages.
    """
    async with service.rendering:  # waiting chats occupy no thread
        return await asyncio.to_thread(_render, service, body, tools)


def _render(service: Service, body: Chat | TokenizeBody, tools: ToolSet | None) -> tuple[str, Dialect]:
    field = body.prompt_field
    if service.dialect is None:
        raise ApiError(
            400,
            "this model has no chat template; use /v1/completions, or a chat model, such as gapless serve smollm2",
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
        raise ApiError(400, f"{field}, tools: nested too deeply", param="tools") from error
    except ChatTemplateError as error:
        names = ("continue_final_message", "chat_template")
        named = next((name for name in names if str(error).startswith(f"{name}:")), field)
        raise ApiError(400, str(error), param=named) from error


def output_room(service: Service, body: SamplingBody, prompts: Sequence[Sequence[int]], asked: int | None) -> int:
    """Return the maximum number of output tokens: as requested, else generation_config.json's, capped by the context.

    Raises:
        ApiError: the prompt and the output exceed the context length.
    """
    context = service.max_model_len
    longest = max((len(prompt) for prompt in prompts), default=0)
    left = context - longest
    if left < 1 or (asked is not None and asked > left):
        raise too_long(longest, asked or 1, context, body.prompt_field, body.length_field)
    return min(left, service.sampling.get("max_tokens", left)) if asked is None else asked
