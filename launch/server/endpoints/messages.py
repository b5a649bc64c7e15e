"""Anthropic's `POST /v1/messages`: answers of thinking, text and tool calls, whole or as events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....runtime.engine.outputs import CompletionOutput
from ..answers import Answer, Asked, PromptLogprobs
from ..engine_client import Delta
from ..errors import ApiError
from ..json_response import json_response
from ..messages_input import MessagesBody
from ..prompting import ask_messages, ask_turn
from ..service import Service
from ..tools.reader import Arguments, Called, Part, Reasoned

_REASONS = {"length": "max_tokens", "stop": "end_turn", "tool_calls": "tool_use"}


async def ask(service: Service, body: MessagesBody) -> Asked:
    """Turn the body into a generation request; raises `ApiError` if it is invalid."""
    if body.max_tokens is None:
        raise ApiError(400, "max_tokens: required", param="max_tokens")
    prompts, speech, params = await ask_turn(service, body, body.max_tokens, None)
    return Asked(body, prompts, params, MessageAnswer(service.model, prompts, body, service.intake.tokenizer, speech))


async def count_tokens(service: Service, request: Request) -> Response:
    """Return the number of prompt tokens of Anthropic's messages."""
    body: MessagesBody = request.state.body
    ((tokens,), _) = await ask_messages(service, body, body.max_tokens)
    return json_response({"input_tokens": len(tokens)})


class MessageAnswer(Answer):
    """The answer of `/v1/messages`."""

    kind = "message"
    prefix = "msg_"
    end = b""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._blocks: list[dict[str, Any]] = []  # the last may be open; tool-call arguments are text
        self._is_open = False
        self._stop: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}

    def first_chunks(self) -> Iterator[bytes]:
        """Yield the event that begins the message."""
        yield _event("message_start", message=self._message())

    def chunk(self, delta: Delta) -> bytes:
        """Return the events of one token."""
        self._count(delta)
        events = b"".join(self._events(self._read(0, delta.text, delta.finish_reason is not None)))
        self._set_stop(delta.finish_reason, delta.stop_reason)
        return events

    def last_chunks(self) -> Iterator[bytes]:
        """Yield the events that end the newest block and the message."""
        yield from self._end()
        yield _event("message_delta", delta=self._stop, usage=self._usage)
        yield _event("message_stop")

    def error(self, error: ApiError) -> bytes:
        """Return the error event that ends a stream."""
        body = error.anthropic_body
        return _event("error", error=body["error"], request_id=body["request_id"])

    def whole(self, outputs: Sequence[CompletionOutput], prompts: PromptLogprobs) -> bytes:
        """Return the message of the only output, in JSON."""
        (output,) = outputs
        self._count_all(outputs)
        for _ in (*self._events(self._read(0, output.text, True)), *self._end()):
            pass
        self._set_stop(output.finish_reason, output.stop_reason)
        for block in self._blocks:
            if block["type"] == "tool_use":
                block["input"] = _object(block["input"])
        return msgspec.json.encode(self._message())

    def _events(self, parts: Sequence[Part]) -> Iterator[bytes]:
        """Add parts of the output to its blocks; yield the resulting events."""
        for part in parts:
            if isinstance(part, Called):
                yield from self._begin({"type": "tool_use", "id": self._call_id(0, part), "name": part.name})
            elif isinstance(part, Arguments):
                self._blocks[-1]["input"] += part.text
                yield self._delta("input_json_delta", "partial_json", part.text)
            elif not part.text:
                continue
            elif isinstance(part, Reasoned):
                yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
                self._blocks[-1]["thinking"] += part.text
                yield self._delta("thinking_delta", "thinking", part.text)
            else:
                yield from self._begin({"type": "text", "text": ""})
                self._blocks[-1]["text"] += part.text
                yield self._delta("text_delta", "text", part.text)

    def _begin(self, block: dict[str, Any]) -> Iterator[bytes]:
        """Begin a block, unless it is not a tool call and a block of its type is open."""
        if self._is_open and self._blocks[-1]["type"] == block["type"] != "tool_use":
            return
        yield from self._end()
        is_call = block["type"] == "tool_use"
        shown = block | ({"input": {}} if is_call else {})
        yield _event("content_block_start", index=len(self._blocks), content_block=shown)
        self._blocks.append(block | ({"input": ""} if is_call else {}))
        self._is_open = True

    def _end(self) -> Iterator[bytes]:
        """End the block that is open, if any."""
        if self._is_open:
            if self._blocks[-1]["type"] == "thinking":  # not verified here, but clients expect one
                yield self._delta("signature_delta", "signature", "")
            self._is_open = False
            yield _event("content_block_stop", index=len(self._blocks) - 1)

    def _delta(self, kind: str, key: str, text: str) -> bytes:
        return _event("content_block_delta", index=len(self._blocks) - 1, delta={"type": kind, key: text})

    def _set_stop(self, reason: str | None, found: str | int | None) -> None:
        if reason is not None:
            is_text = isinstance(found, str)
            word = "stop_sequence" if is_text else _REASONS.get(self._reason(0, reason) or "", "end_turn")
            self._stop = {"stop_reason": word, "stop_sequence": found if isinstance(found, str) else None}

    def _message(self) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self._model, "content": self._blocks}
        return {**head, **self._stop, "usage": self._usage}

    @property
    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self._prompt_tokens - self._cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self._cached_tokens,
            "output_tokens": self._completion_tokens,
        }


def _event(name: str, /, **fields: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode({"type": name, **fields}) + b"\n\n"


def _object(arguments: str) -> dict[str, Any]:
    """Return a tool call's input; all but JSON objects are wrapped under `INVALID_JSON`, as Anthropic documents."""
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": arguments}
