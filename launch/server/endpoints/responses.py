"""`POST /v1/responses`: answers a conversation with reasoning, text and tool calls, whole or as events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ....models.tokenizer import Tokenizer
from ....runtime.engine.outputs import CompletionOutput
from ..answers import Answer, Asked, PromptLogprobs
from ..engine_client import Delta
from ..errors import ApiError
from ..prompting import ask_turn
from ..requests import ResponseBody
from ..service import Service
from ..tools.reader import Arguments, Called, Part, Reasoned
from ..tools.tool_set import Function


async def ask(service: Service, body: ResponseBody) -> Asked:
    """Turn the body into a generation request; raises `ApiError` if it is invalid."""
    prompts, speech, params = await ask_turn(service, body, body.max_output_tokens, body.num_logprobs)
    said = body.model_dump(include={"instructions", "max_output_tokens", "metadata"})
    said |= body.model_dump(include={"tools", "tool_choice", "parallel_tool_calls", "reasoning"}, exclude_none=True)
    if "tools" in said:
        said["tools"] = [each for each in said["tools"] if each["type"] not in body.ignored_tools]
    said |= {"temperature": params.temperature, "top_p": params.top_p}
    answer = ResponseAnswer(service.model, prompts, body, service.intake.tokenizer, speech, asked=said)
    return Asked(body, prompts, params, answer)


class ResponseAnswer(Answer):
    """The answer of `/v1/responses`.

    Args:
        asked: the request fields that the answer echoes.
    """

    kind = "response"
    prefix = "resp_"

    def __init__(self, *args: Any, asked: Mapping[str, Any], **options: Any) -> None:
        super().__init__(*args, **options)
        self._asked = asked
        self._sequence = 0
        self._items: list[dict[str, Any]] = []  # the last may be open
        self._is_open = False
        self._logprobs: list[dict[str, Any]] = []
        self._finish_reason: str | None = None

    def first_chunks(self) -> Iterator[bytes]:
        """Yield the events that open the response."""
        begun = self._body("in_progress")
        yield self._event_of("response.created", response=begun)
        yield self._event_of("response.in_progress", response=begun)

    def chunk(self, delta: Delta) -> bytes:
        """Return the events of one token, and keep its text for the last events, which contain all of it."""
        self._count(delta)
        self._finish_reason = delta.finish_reason
        found = [] if delta.token is None or delta.logprobs is None else [self._logprob(delta.token, delta.logprobs)]
        self._logprobs += found
        return b"".join(self._events(self._read(0, delta.text, delta.finish_reason is not None), found))

    def last_chunks(self) -> Iterator[bytes]:
        """Yield the events that close the newest item and the response, each with all of the text."""
        yield from self._ended()
        body = self._body(_status(self._finish_reason))
        yield self._event_of(f"response.{body['status']}", response=body)

    def error(self, error: ApiError) -> bytes:
        """Return the event of a failed response, with the output so far, which ends a stream."""
        code = error.code or ("server_error" if error.status >= 500 else "invalid_prompt")
        body = self._body("failed") | {"error": {"code": code, "message": error.message}}
        return self._event_of("response.failed", response=body)

    def refusal(self, error: ApiError) -> bytes:
        """Return the whole stream of a request that is refused after its response was created, as OpenAI does."""
        return b"".join((*self.first_chunks(), self._event_of("error", **error.body), self.error(error)))

    def whole(self, outputs: Sequence[CompletionOutput], prompts: PromptLogprobs) -> bytes:
        """Return the response of the only output, in JSON."""
        (output,) = outputs
        self._count_all(outputs)
        self._finish_reason = output.finish_reason
        pairs = zip(output.token_ids, output.logprobs or (), strict=False)
        self._logprobs = [self._logprob(token, found) for token, found in pairs]
        for _ in (*self._events(self._read(0, output.text, True), []), *self._ended()):
            pass
        return msgspec.json.encode(self._body(_status(self._finish_reason)))

    def _events(self, parts: Sequence[Part], logprobs: list[dict[str, Any]]) -> Iterator[bytes]:
        """Add parts of the output to its items; yield the resulting events."""
        for part in parts:
            if isinstance(part, Called):
                yield from self._begin_call(part)
            elif isinstance(part, Arguments):
                if "input" in self._items[-1]:  # text input, decoded once its JSON is complete
                    self._items[-1]["input"] += part.text
                    continue
                self._items[-1]["arguments"] += part.text
                yield self._event_of("response.function_call_arguments.delta", **self._place, delta=part.text)
            elif isinstance(part, Reasoned):
                yield from self._begin("reasoning", "rs", {"summary": [], "content": []})
                self._items[-1]["content"][0]["text"] += part.text
                yield self._event_of("response.reasoning_text.delta", **self._place, content_index=0, delta=part.text)
            else:
                yield from self._begin("message", "msg", {"status": "in_progress", "role": "assistant", "content": []})
                self._items[-1]["content"][0]["text"] += part.text
                fields = {**self._place, "content_index": 0, "delta": part.text, "logprobs": logprobs}
                yield self._event_of("response.output_text.delta", **fields)

    def _begin_call(self, part: Called) -> Iterator[bytes]:
        tools = self.speech.tools if self.speech is not None else None
        functions = {each.name: each for each in tools.functions} if tools is not None else {}
        function = functions.get(part.name, Function(part.name))
        call = {"call_id": self._call_id(0, part), "name": part.name, "status": "in_progress"}
        if function.namespace:
            call |= {"name": part.name.removeprefix(f"{function.namespace}."), "namespace": function.namespace}
        if function.takes_text:
            yield from self._begin("custom_tool_call", "ctc", call | {"input": ""})
        else:
            yield from self._begin("function_call", "fc", call | {"arguments": ""})

    def _begin(self, kind: str, prefix: str, item: dict[str, Any]) -> Iterator[bytes]:
        """Begin an item, unless it is not a call and an item of its type is open."""
        is_call = "call_id" in item
        if self._is_open and self._items[-1]["type"] == kind and not is_call:
            return
        yield from self._end()
        number = len(self._items)
        id = f"{prefix}_{self.id.removeprefix(self.prefix)}" + (f"_{number}" if number else "")
        self._items.append({"type": kind, "id": id, **item})
        self._is_open = True
        yield self._event_of("response.output_item.added", output_index=number, item=self._items[-1])
        if not is_call:
            part = _part("", []) if kind == "message" else {"type": "reasoning_text", "text": ""}
            yield self._event_of("response.content_part.added", **self._place, content_index=0, part=part)
            self._items[-1]["content"] = [part]

    def _end(self, status: str = "completed") -> Iterator[bytes]:
        """End the open item, if any. A message or call that `max_output_tokens` truncated is `incomplete`."""
        if not self._is_open:
            return
        self._is_open, item, place = False, self._items[-1], self._place
        if "input" in item:
            item["input"] = _input(item["input"])
            yield self._event_of("response.custom_tool_call_input.delta", **place, delta=item["input"])
            yield self._event_of("response.custom_tool_call_input.done", **place, input=item["input"])
        elif item["type"] == "function_call":
            whole = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event_of("response.function_call_arguments.done", **place, **whole)
        else:
            (part,) = item["content"]
            place["content_index"] = 0
            if item["type"] == "message":
                part["logprobs"] = self._logprobs
                yield self._event_of("response.output_text.done", **place, text=part["text"], logprobs=self._logprobs)
            else:
                yield self._event_of("response.reasoning_text.done", **place, text=part["text"])
            yield self._event_of("response.content_part.done", **place, part=part)
        if "status" in item:
            item["status"] = status
        yield self._event_of("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _ended(self) -> Iterator[bytes]:
        """End the output. It gets an empty message if it has only reasoning."""
        if not any(item["type"] != "reasoning" for item in self._items):
            yield from self._begin("message", "msg", {"status": "in_progress", "role": "assistant", "content": []})
        yield from self._end(_status(self._finish_reason))

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _event_of(self, name: str, /, **fields: Any) -> bytes:
        body = msgspec.json.encode({"type": name, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return b"event: " + name.encode() + b"\ndata: " + body + b"\n\n"

    def _body(self, status: str) -> dict[str, Any]:
        usage = None
        if status not in ("in_progress", "failed"):
            usage = {
                "input_tokens": self._prompt_tokens,
                "input_tokens_details": {"cached_tokens": self._cached_tokens},
                "output_tokens": self._completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
                "total_tokens": self._prompt_tokens + self._completion_tokens,
            }
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "model": self._model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [] if status == "in_progress" else self._items,
            "parallel_tool_calls": False,
            "tool_choice": "auto" if self._asked.get("tools") else "none",
            "tools": [],
            "usage": usage,
            **self._asked,
        }


def refused_stream(body: ResponseBody, error: ApiError) -> bytes:
    """Return the events that answer a streaming request that exceeds the context."""
    return ResponseAnswer(body.model or "", [], body, Tokenizer(0), asked={}).refusal(error)


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _input(arguments: str) -> str:
    """Return the text in the arguments of a text-input tool; invalid arguments are returned unchanged."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, str])["input"]
    except (msgspec.DecodeError, KeyError, RecursionError, UnicodeDecodeError):
        return arguments


def _status(reason: str | None) -> str:
    return "incomplete" if reason == "length" else "completed"
