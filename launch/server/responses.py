"""What the server answers to `/v1/responses`: a message of one text, whole or as events. OpenAI's bodies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ...runtime.engine.outputs import CompletionOutput
from .answers import Answer, PromptLogprobs
from .engine_client import Delta


class ResponseAnswer(Answer):
    """The answer of `/v1/responses`.

    Args:
        asked: what of the request the answer says again.
    """

    kind = "response"
    prefix = "resp_"

    def __init__(self, *args: Any, asked: Mapping[str, Any], **options: Any) -> None:
        super().__init__(*args, **options)
        self._asked = asked
        self._sequence = 0
        self._text: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._reason: str | None = None

    @property
    def _message_id(self) -> str:
        return "msg_" + self.id.removeprefix(self.prefix)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message_id, "output_index": 0, "content_index": 0}

    def first_chunks(self) -> Iterator[bytes]:
        """Yield the events that open the response, its one message and the text in it."""
        begun = self._body("in_progress", [])
        yield self._event_of("response.created", response=begun)
        yield self._event_of("response.in_progress", response=begun)
        yield self._event_of("response.output_item.added", output_index=0, item=self._message("in_progress", None))
        yield self._event_of("response.content_part.added", **self._place, part=_part("", []))

    def chunk(self, delta: Delta) -> bytes:
        """Return the event of one token, and keep its text for the last events, which hold all of it."""
        self._count(delta)
        self._text.append(delta.text)
        self._reason = delta.finish_reason
        found = [] if delta.token is None or delta.logprobs is None else [self._logprob(delta.token, delta.logprobs)]
        self._logprobs += found
        return self._event_of("response.output_text.delta", **self._place, delta=delta.text, logprobs=found)

    def last_chunks(self) -> Iterator[bytes]:
        """Yield the events that close the text, the message and the response, each with all of the text."""
        text = "".join(self._text)
        message = self._message("completed", text)
        body = self._body(_status(self._reason), [message])
        yield self._event_of("response.output_text.done", **self._place, text=text, logprobs=self._logprobs)
        yield self._event_of("response.content_part.done", **self._place, part=_part(text, self._logprobs))
        yield self._event_of("response.output_item.done", output_index=0, item=message)
        yield self._event_of(f"response.{body['status']}", response=body)

    def whole(self, outputs: Sequence[CompletionOutput], prompts: PromptLogprobs) -> bytes:
        """Return the response of the only output, in JSON."""
        (output,) = outputs
        self._count_all(outputs)
        pairs = zip(output.token_ids, output.logprobs or (), strict=False)
        self._logprobs = [self._logprob(token, found) for token, found in pairs]
        return msgspec.json.encode(self._body(_status(output.finish_reason), [self._message("completed", output.text)]))

    def _event_of(self, name: str, **fields: Any) -> bytes:
        body = msgspec.json.encode({"type": name, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return b"event: " + name.encode() + b"\ndata: " + body + b"\n\n"

    def _message(self, status: str, text: str | None) -> dict[str, Any]:
        content = [] if text is None else [_part(text, self._logprobs)]
        return {"type": "message", "id": self._message_id, "status": status, "role": "assistant", "content": content}

    def _body(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        usage = None
        if status != "in_progress":
            usage = {
                "input_tokens": self._prompt_tokens,
                "input_tokens_details": {"cached_tokens": self._cached_tokens},
                "output_tokens": self._completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
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
            "output": output,
            "parallel_tool_calls": False,
            "tool_choice": "none",
            "tools": [],
            "usage": usage,
            **self._asked,
        }


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _status(reason: str | None) -> str:
    return "incomplete" if reason == "length" else "completed"
