"""`POST /v1/chat/completions`: answers a chat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ....runtime.engine.outputs import CompletionOutput, Logprob
from ..answers import Answer, Asked
from ..engine_client import Delta
from ..prompting import ask_turn
from ..requests import ChatBody
from ..service import Service
from ..tools.reader import Arguments, Called, Part, Said


async def ask(service: Service, body: ChatBody) -> Asked:
    """Turn the body into a generation request; raises `ApiError` if it is invalid."""
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    prompts, speech, params = await ask_turn(service, body, asked, body.num_logprobs, body.add_special_tokens)
    return Asked(body, prompts, params, ChatAnswer(service.model, prompts, body, service.intake.tokenizer, speech))


class ChatAnswer(Answer):
    """The answer of `/v1/chat/completions`."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl-"

    def first_chunks(self) -> Iterator[bytes]:
        """Yield an event with the role `assistant` for each choice."""
        for index in range(self._n):
            delta = {"role": "assistant", "content": ""}
            yield self._event([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}], False)

    def _choice_of(self, delta: Delta) -> dict[str, Any]:
        logprobs = None
        if delta.logprobs is not None and delta.token is not None:
            logprobs = {"content": [self._logprob(delta.token, delta.logprobs)]}
        parts = self._read(delta.index, delta.text, delta.finish_reason is not None)
        return {
            "index": delta.index,
            "delta": self._message(delta.index, parts),
            "logprobs": logprobs,
            "finish_reason": self._reason(delta.index, delta.finish_reason),
            "stop_reason": delta.stop_reason,
        }

    def _whole_choice(self, output: CompletionOutput, prompt: list[dict[int, Logprob] | None] | None) -> dict[str, Any]:
        logprobs = None
        if output.logprobs is not None:
            pairs = zip(output.token_ids, output.logprobs, strict=True)
            logprobs = {"content": [self._logprob(token, found) for token, found in pairs]}
        message = self._message(output.index, self._read(output.index, output.text, True))
        for call in message.get("tool_calls", ()):
            del call["index"]
        content = None if "tool_calls" in message else ""
        return {"message": {"role": "assistant", "content": content, **message}, "logprobs": logprobs}

    def _message(self, index: int, parts: Sequence[Part]) -> dict[str, Any]:
        """Return parts of an output as a message or a message delta."""
        found: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for part in parts:
            if isinstance(part, Called):
                function = {"name": part.name, "arguments": ""}
                called = {"index": part.index, "id": self._call_id(index, part), "type": "function"}
                calls[part.index] = called | {"function": function}
            elif isinstance(part, Arguments):
                call = calls.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
                call["function"]["arguments"] += part.text
            else:
                key = "content" if isinstance(part, Said) else "reasoning_content"
                found[key] = found.get(key, "") + part.text
        return found | ({"tool_calls": list(calls.values())} if calls else {})
