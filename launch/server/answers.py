"""Makes the server's answers to completions and chats in OpenAI's JSON: whole bodies, and the events of streams."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from ...conf.sampling import SamplingParams
from ...models.tokenizer import Detokenizer, Tokenizer
from ...runtime.engine.outputs import CompletionOutput, Logprob
from .engine_client import Delta
from .errors import ApiError
from .requests import CompletionBody, SamplingBody, StreamOptions, each_output
from .tools.dialect import Speech
from .tools.reader import Arguments, Called, Part, Reader, Reasoned, Said

PromptLogprobs = Mapping[int, list[dict[int, Logprob] | None]]  # by the index of an output


class Answer:
    """The answer to one request of the API.

    `whole` makes the body of an answer. `first_chunks`, `chunk` and `last_chunks` make the events of a stream.

    Args:
        model: the model's name.
        prompts: the token ids of each prompt.
        body: of the request.
        tokenizer: gives the text and the bytes of a token.
        speech: how outputs are read; None: as they are.
    """

    kind: str  # `object` of a whole answer
    chunk_kind: str  # `object` of an event
    prefix: str  # of the answer's id
    end = b"data: [DONE]\n\n"  # what a stream ends with

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
        self._top: int = getattr(body, "top_logprobs", None) or 0  # tokens that stand beside each
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
        """Return the event of an error, which ends a stream."""
        return b"data: " + msgspec.json.encode(error.body) + b"\n\n"

    def whole(self, outputs: Sequence[CompletionOutput], prompts: PromptLogprobs) -> bytes:
        """Return the body of an answer that is not streamed."""
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
        """Return why an output has ended, in the API's words."""
        reader = self._readers.get(index)
        return "tool_calls" if reason == "stop" and reader is not None and reader.num_calls else reason

    def _count(self, delta: Delta) -> None:
        """Add a token to the usage."""
        self._completion_tokens += delta.token is not None
        if delta.index % self._n == 0:  # the first output of its prompt
            self._cached_tokens += delta.cached_tokens

    def _count_all(self, outputs: Sequence[CompletionOutput]) -> None:
        """Set the usage to that of finished outputs."""
        self._completion_tokens = sum(len(output.token_ids) for output in outputs)
        self._is_whole = True
        if self.speech is not None:
            self._reasoning_tokens = sum(self.speech.reasoning_tokens(output.token_ids) for output in outputs)
        self._cached_tokens = sum(output.cached_tokens for output in outputs[:: self._n])

    def _read(self, index: int, text: str, is_last: bool) -> list[Part]:
        """Return what more of an output's text is: all of it the answer's, where nothing else is looked for."""
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


class CompletionAnswer(Answer):
    """The answer of `/v1/completions`.

    Args:
        echoes: the text of each prompt. Each output begins with that of its prompt, and its log-probabilities with
            those of the prompt's tokens. None: prompts are not echoed.
    """

    kind = chunk_kind = "text_completion"
    prefix = "cmpl-"

    def __init__(
        self,
        model: str,
        prompts: Sequence[Sequence[int]],
        body: CompletionBody,
        tokenizer: Tokenizer,
        echoes: Sequence[str] | None,
    ) -> None:
        super().__init__(model, prompts, body, tokenizer)
        self._skip_special_tokens = body.skip_special_tokens
        self._echoes = echoes
        self._is_echo_only = body.max_tokens == 0
        self._num_prompt_logprobs = body.prompt_logprobs
        self._begun: set[int] = set()
        self._offsets: dict[int, _Offsets] = {}  # of each output

    def chunk(self, delta: Delta) -> bytes:
        """Return the event of one token. It has no text if only the prompt was asked for."""
        if self._is_echo_only:
            delta = replace(delta, text="", token=None, logprobs=None, finish_reason="length", stop_reason=None)
        return super().chunk(delta)

    def whole(self, outputs: Sequence[CompletionOutput], prompts: PromptLogprobs) -> bytes:
        """Return the body. It has no generated text if only the prompt was asked for."""
        if self._is_echo_only:
            outputs = [
                CompletionOutput(output.index, finish_reason="length", logprobs=None if output.logprobs is None else [])
                for output in outputs
            ]
        return super().whole(outputs, prompts)

    def _echo(self, index: int) -> str:
        """Return the prompt's text at the first call for an output, then an empty text."""
        if self._echoes is None or index in self._begun:
            return ""
        self._begun.add(index)
        return self._echoes[index // self._n]

    def _choice_of(self, delta: Delta) -> dict[str, Any]:
        text = self._echo(delta.index) + delta.text
        tokens = [] if delta.token is None else [delta.token]
        found = None if delta.logprobs is None else [delta.logprobs]
        logprobs = self._logprobs(delta.index, tokens, found, delta.prompt_logprobs)
        return {
            "index": delta.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def _whole_choice(self, output: CompletionOutput, prompt: list[dict[int, Logprob] | None] | None) -> dict[str, Any]:
        echo = self._echo(output.index)
        logprobs = self._logprobs(output.index, output.token_ids, output.logprobs, prompt)
        choice: dict[str, Any] = {"text": echo + output.text, "logprobs": logprobs}
        if self._num_prompt_logprobs is not None and prompt is not None:
            best = self._num_prompt_logprobs
            own = self._prompts[output.index // self._n]
            pairs = zip(own, prompt, strict=True)
            choice["prompt_logprobs"] = [each and _most_likely(each, token, best) for token, each in pairs]
        return choice

    def _logprobs(
        self,
        index: int,
        tokens: Sequence[int],
        found: Sequence[dict[int, Logprob]] | None,
        prompt: Sequence[dict[int, Logprob] | None] | None,
    ) -> dict[str, list[Any]] | None:
        """Return the log-probabilities of an output's tokens, after those of its prompt if they are echoed.

        Args:
            index: of the output.
            tokens: of the output.
            found: the log-probabilities of each of these tokens; None if they were not asked for.
            prompt: those of each token of the prompt; None if it is not echoed.
        """
        pairs: list[tuple[int, dict[int, Logprob] | None]] = list(zip(tokens, found or (), strict=False))
        offsets: list[int] = []
        if self._echoes is not None and prompt is not None:
            own = self._prompts[index // self._n]
            pairs = [*zip(own, prompt, strict=True), *pairs]
            offsets = _Offsets(self._tokenizer, True, 0).of(own)
        elif found is None:
            return None
        if index not in self._offsets:
            begin = len(self._echoes[index // self._n]) if self._echoes is not None else 0
            self._offsets[index] = _Offsets(self._tokenizer, self._skip_special_tokens, begin)
        offsets += self._offsets[index].of(tokens)
        columns: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for (token, each), offset in zip(pairs, offsets, strict=True):
            names = self._names(token, each or {})
            columns["text_offset"].append(offset)
            columns["token_logprobs"].append(None if each is None else each[token].logprob)
            columns["tokens"].append(names[token])
            top = None if each is None else {names[key]: one.logprob for key, one in each.items()}
            columns["top_logprobs"].append(top)
        return columns

    def _names(self, sampled: int, others: Mapping[int, Logprob]) -> dict[int, str]:
        """Return a key for each token, none twice: its text; its bytes if they are no text; else its id too.

        Of tokens with one text `sampled` keeps it, or else the first.
        """
        found: dict[int, str] = {}
        for token in dict.fromkeys((sampled, *others)):
            raw, known = self._tokenizer.token_bytes(token), others.get(token)
            name = self._tokenizer.decode([token], skip_special=False) if known is None else known.decoded_token
            if self._names_by_id:
                name = f"token_id:{token}"
            elif raw is not None and (name.encode() != raw or not raw):
                name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
            found[token] = name if name not in found.values() else f"{name} (token_id:{token})"
        return found


class _Offsets:
    """Where tokens begin in a text, in characters. The tokens of one character begin where it does."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, begin: int) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special)
        self._next = begin

    def of(self, tokens: Sequence[int]) -> list[int]:
        """Return the offsets of the next tokens."""
        found = []
        for token in tokens:
            found.append(self._next)
            self._next += len(self._detokenizer.push(token))
        return found


def _most_likely(found: dict[int, Logprob], token: int, number: int) -> dict[int, Logprob]:
    """Return, of the log-probabilities `found`, those of `token` and of the `number` most likely tokens."""
    return {key: one for key, one in found.items() if key == token or (one.rank or 0) <= number}


class ChatAnswer(Answer):
    """The answer of `/v1/chat/completions`."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl-"

    def first_chunks(self) -> Iterator[bytes]:
        """Yield an event for each choice, which names the role `assistant`."""
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
        """Return parts of an output as a message, or as what is added to one."""
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


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for: its prompts as token ids, how to sample `body.n` outputs of each, and the answer."""

    body: SamplingBody
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    answer: Answer

    @property
    def outputs(self) -> list[tuple[Sequence[int], SamplingParams]]:
        """The prompt and the parameters of each output, in their order."""
        return [(prompt, each) for prompt in self.prompts for each in each_output(self.params, self.body.n)]
