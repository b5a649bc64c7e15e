"""`POST /v1/completions`: continues prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ....models.tokenizer import Detokenizer, Tokenizer
from ....runtime.engine.outputs import CompletionOutput, Logprob
from ..answers import Answer, Asked, PromptLogprobs
from ..engine_client import Delta
from ..errors import ApiError
from ..prompting import encode_prompts, output_room
from ..requests import CompletionBody
from ..service import Service


async def ask(service: Service, body: CompletionBody) -> Asked:
    """Turn the body into a generation request; raises `ApiError` if it is invalid."""
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens: must be 1 or more, or 0 with echo", param="max_tokens")
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError(400, "prompt_logprobs: not supported with stream=true", param="prompt_logprobs")
    prompts = await encode_prompts(service, body, body.prompts, body.max_tokens, body.add_special_tokens)
    room = output_room(service, body, prompts, body.max_tokens)
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


class CompletionAnswer(Answer):
    """The answer of `/v1/completions`.

    Args:
        echoes: the text of each prompt. Each output starts with its prompt's text, its log-probabilities with the
            prompt tokens'. None: prompts are not echoed.
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
        """Return the prompt's text on the first call for an output, then an empty text."""
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
        """Return the log-probabilities of an output's tokens, preceded by the prompt's if it is echoed.

        Args:
            index: the output's index.
            tokens: the output's tokens.
            found: the log-probabilities of each of these tokens; None if they were not requested.
            prompt: the log-probabilities of each prompt token; None if the prompt is not echoed.
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
        """Return a unique key for each token: its text, or its bytes if they are not text; duplicates get the id too.

        Among tokens with the same text, `sampled` keeps it, or else the first.
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
    """Character offsets of tokens in a text. Tokens that share a character have the same offset."""

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
    """Filter the log-probabilities `found` to `token` and the `number` most likely tokens."""
    return {key: one for key, one in found.items() if key == token or (one.rank or 0) <= number}
