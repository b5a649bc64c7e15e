"""Builds answers to completions and chats in OpenAI's JSON: whole bodies and stream events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ...conf.sampling import SamplingParams
from ...models.tokenizer import Tokenizer
from ...runtime.engine.outputs import CompletionOutput, Logprob
from .engine_client import Delta
from .errors import ApiError
from .requests import SamplingBody, StreamOptions, each_output
from .tools.dialect import Speech
from .tools.reader import Called, Part, Reader, Reasoned, Said

PromptLogprobs = Mapping[int, list[dict[int, Logprob] | None]]  # by the index of an output


class Answer:
    """The answer to one request of the API.

    `whole` makes the body of an answer. `first_chunks`, `chunk` and `last_chunks` make the events of a stream.

    Args:
        model: the model's name.
        prompts: the token ids of each prompt.
        body: the request's body.
        tokenizer: gives the text and the bytes of a token.
        speech: how outputs are parsed; None: they are plain text.
    """

    kind: str  # `object` of a whole answer
    chunk_kind: str  # `object` of an event
    prefix: str  # of the answer's id
    end = b"data: [DONE]\n\n"  # the last event of a stream

    def __init__(
        self,
        model: str,
        prompts: Sequence[Sequence[int]],
        body: SamplingBody,
        tokenizer: Tokenizer,
        speech: Speech | None = None,
    ) -> None:
        self.id = self.prefix + secrets.token_hex(12)
        self.created = int(time.time())
        self._model = model
        self._prompt_tokens = sum(len(prompt) for prompt in prompts)
        self._options = body.stream_options or StreamOptions()
        self._tokenizer = tokenizer
        self._top: int = getattr(body, "top_logprobs", None) or 0  # alternatives per token
        self._return_token_ids = body.return_token_ids
        self._names_by_id = body.return_tokens_as_token_ids
        self._prompts = prompts
        self._n = body.n
        self._completion_tokens = 0
        self._cached_tokens = 0
        self.speech = speech
        self._readers: dict[int, Reader] = {}  # of each output
        self._is_whole = False
        self._reasoning_tokens = 0

    def first_chunks(self) -> Iterator[bytes]:
        """Yield the events before any token."""
        return iter(())

    def chunk(self, delta: Delta) -> bytes:
        """Return the event of one token."""
        self._count(delta)
        choice = self._choice_of(delta)
        if self._return_token_ids:
            choice["token_ids"] = [] if delta.token is None else [delta.token]
        return self._event([choice], self._options.continuous_usage_stats)

    def last_chunks(self) -> Iterator[bytes]:
        """Yield the events after the last token."""
        if self._options.include_usage:
            yield self._event([], True)

    def error(self, error: ApiError) -> bytes:
        """Return the error event that ends a stream."""
        return b"data: " + msgspec.json.encode(error.body) + b"\n\n"

    def whole(self, outputs: Sequence[CompletionOutput], prompts: PromptLogprobs) -> bytes:
        """Return the body of a non-streaming answer."""
        self._count_all(outputs)
        choices = []
        for output in outputs:
            choice = self._whole_choice(output, prompts.get(output.index))
            reason = self._reason(output.index, output.finish_reason)
            choice |= {"index": output.index, "finish_reason": reason, "stop_reason": output.stop_reason}
            if self._return_token_ids:
                choice["token_ids"] = output.token_ids
                choice["prompt_token_ids"] = self._prompts[output.index // self._n]
            choices.append(choice)
        return msgspec.json.encode(self._head(self.kind) | {"choices": choices, "usage": self._usage})

    def _reason(self, index: int, reason: str | None) -> str | None:
        """Return the API's finish reason of an output."""
        reader = self._readers.get(index)
        return "tool_calls" if reason == "stop" and reader is not None and reader.num_calls else reason

    def _count(self, delta: Delta) -> None:
        """Add a token to the usage."""
        self._completion_tokens += delta.token is not None
        if delta.index % self._n == 0:  # the first output of its prompt
            self._cached_tokens += delta.cached_tokens

    def _count_all(self, outputs: Sequence[CompletionOutput]) -> None:
        """Set the usage to the totals of finished outputs."""
        self._completion_tokens = sum(len(output.token_ids) for output in outputs)
        self._is_whole = True
        if self.speech is not None:
            self._reasoning_tokens = sum(self.speech.reasoning_tokens(output.token_ids) for output in outputs)
        self._cached_tokens = sum(output.cached_tokens for output in outputs[:: self._n])

    def _read(self, index: int, text: str, is_last: bool) -> list[Part]:
        """Parse the next piece of an output's text. Without `speech`, all of it is answer text."""
        if self.speech is None:
            return [Said(text)]
        if (reader := self._readers.get(index)) is None:
            reader = self._readers[index] = self.speech.reader()
        parts = reader.push(text)
        self._reasoning_tokens += reader.is_reasoning and not self._is_whole
        parts = [*parts, *(reader.finish() if is_last else ())]
        return [part for part in parts if self.speech.shows_reasoning or not isinstance(part, Reasoned)]

    def _call_id(self, index: int, call: Called) -> str:
        assert self.speech is not None
        return self.speech.call_id(self.id, index, call.index, call.id)

    def _choice_of(self, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _whole_choice(self, output: CompletionOutput, prompt: list[dict[int, Logprob] | None] | None) -> dict[str, Any]:
        raise NotImplementedError

    def _logprob(self, token: int, found: dict[int, Logprob]) -> dict[str, Any]:
        best = sorted(found.items(), key=lambda item: item[1].rank or 0)[: self._top]
        return self._named(token, found[token]) | {"top_logprobs": [self._named(*each) for each in best]}

    def _named(self, token: int, found: Logprob) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token)
        raw = found.decoded_token.encode() if raw is None else raw
        return {
            "token": f"token_id:{token}" if self._names_by_id else found.decoded_token,
            "logprob": found.logprob,
            "bytes": list(raw),
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self._model}

    def _event(self, choices: list[dict[str, Any]], with_usage: bool) -> bytes:
        body = self._head(self.chunk_kind) | {"choices": choices}
        if with_usage:
            body["usage"] = self._usage
        elif self._options.include_usage:
            body["usage"] = None
        return b"data: " + msgspec.json.encode(body) + b"\n\n"

    @property
    def _usage(self) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }
        if self.speech is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self._reasoning_tokens}
        return usage


@dataclass(frozen=True, slots=True)
class Asked:
    """A parsed request: prompts as token ids, sampling parameters for `body.n` outputs of each, and the answer."""

    body: SamplingBody
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    answer: Answer

    @property
    def outputs(self) -> list[tuple[Sequence[int], SamplingParams]]:
        """The prompt and the parameters of each output, in order."""
        return [(prompt, each) for prompt in self.prompts for each in each_output(self.params, self.body.n)]
