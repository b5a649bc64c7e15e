"""Prompt intake: tokenizes prompts and checks them against the model and the cache, before any is accepted."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from ...conf.build import is_unicode
from ...conf.errors import ConfigError
from ...conf.sampling import SamplingParams
from ...models.chat_template import ChatTemplate, Conversation, checked_messages, load_chat_template
from ...models.grammar import Grammars
from ...models.json_file import read_if_there
from ...models.tokenizer import NoTokenizer, Tokenizer, load_tokenizer
from .plan import Plan

Prompt = str | Sequence[int] | Conversation | Mapping[str, Any]

_CHARACTERS_A_TOKEN = 1024  # longer than any token of any vocabulary


class PromptTooLong(ConfigError):  # noqa: N818
    """The prompt and its output do not fit into the context or the cache.

    Attributes:
        prompt: tokens of the prompt, at least.
        output: tokens of the output, at least.
        limit: most tokens that fit.
    """

    def __init__(self, text: str, prompt: int, output: int, limit: int) -> None:
        super().__init__(text)
        self.prompt, self.output, self.limit = prompt, output, limit


class Intake:
    """Checks and tokenizes prompts for one model and plan. Needs no torch.

    `chat_template` is as in `load_chat_template`.
    """

    def __init__(self, plan: Plan, chat_template: str | None = None) -> None:
        self.tokenizer: Tokenizer = load_tokenizer(plan.tokenizer, plan.arch.vocab_size)
        self._plan = plan
        self._chosen_template = chat_template

    def read(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[tuple[str | None, list[int], SamplingParams]]:
        """Check all prompts, and return each one's text (if it has one), token ids and params.

        Raises:
            ConfigError: a prompt (named by number) is empty, too long, outside the vocabulary or larger than the cache,
                or the model accepts no such messages.
        """
        many = [_plain(number, prompt) for number, prompt in enumerate(_as_list(prompts))]
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(many)
        else:
            each = list(params)
        if len(each) != len(many):
            raise ConfigError(f"{len(many)} prompts, but {len(each)} sampling params: give one, or one per prompt")
        if wrong := [p for p in each if not isinstance(p, SamplingParams)]:
            raise ConfigError(f"sampling params {wrong[0]!r}: must be SamplingParams")
        texts = [self._text(number, prompt) for number, prompt in enumerate(many)]
        each = [self.resolve(params) for params in each]
        taken = []
        for number, (prompt, text, of_it) in enumerate(zip(many, texts, each, strict=True)):
            is_chat = isinstance(prompt, Conversation)  # its template adds the special tokens
            ids = _ids(number, prompt) if text is None else self.tokenizer.encode(text, add_special=not is_chat)
            self.check(number, ids, of_it)
            wanted = of_it.structured_outputs
            self.check_limits(of_it, wanted is None or self._grammars.admits(wanted, of_it))
            taken.append((text, ids, of_it))
        return taken

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The model's chat template; None if it has none.

        Raises:
            ConfigError: it cannot be read, or is not valid Jinja.
        """
        return load_chat_template(self._plan.tokenizer, self._chosen_template)

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        """The contents of tokenizer_config.json; at least its `tokenizer_class`.

        Raises:
            ConfigError: it cannot be read as a JSON object.
        """
        path = Path(self._plan.tokenizer or "none")
        found = read_if_there((path if path.is_dir() else path.parent) / "tokenizer_config.json")
        return {"tokenizer_class": type(self.tokenizer).__name__} | found

    def _text(self, number: int, prompt: Prompt) -> str | None:
        """Return the checked text of a prompt, None for token ids. Messages are rendered by the chat template."""
        if isinstance(prompt, Conversation):
            if self.chat_template is None:
                raise ConfigError(f"prompt {number} is a conversation, but the model has no chat template")
            try:
                prompt = self.chat_template.render(checked_messages(prompt.messages), add_generation_prompt=True)
            except ValueError as error:
                raise ConfigError(f"prompt {number}: {error}") from error
        if not isinstance(prompt, str):
            return None
        self.check_text(number, prompt)
        return prompt

    def resolve(self, params: SamplingParams) -> SamplingParams:
        """Return params with `bad_words` as token ids, both of each word as is and of the word after a space.

        Raises:
            ConfigError: a word is not valid Unicode, or the model has no tokenizer.
        """
        if not params.bad_words:
            return params
        if isinstance(self.tokenizer, NoTokenizer):
            raise ConfigError("sampling.bad_words: the model has no tokenizer; use bad_words_ids")
        if not all(map(is_unicode, params.bad_words)):
            raise ConfigError("sampling.bad_words: contains a lone surrogate, which is not text")
        words = [word.lstrip() for word in params.bad_words]
        forms = [self.tokenizer.encode(prefix + word, add_special=False) for word in words for prefix in ("", " ")]
        sequences = dict.fromkeys((*params.bad_words_ids, *(tuple(ids) for ids in forms if ids)))
        return replace(params, bad_words=(), bad_words_ids=tuple(sequences))

    def check_text(self, number: int, text: str) -> None:
        """Check a text before it is tokenized, which takes seconds per ten megabytes.

        Raises:
            ConfigError: it is not valid Unicode, or too long for the context with any tokenizer.
        """
        if not is_unicode(text):
            raise ConfigError(f"prompt {number} contains a lone surrogate, which is not text")
        longest = self._plan.max_model_len * _CHARACTERS_A_TOKEN
        if len(text) > longest:
            raise PromptTooLong(
                f"prompt {number} has {len(text)} characters; more than {longest} never fit into the context of "
                f"{self._plan.max_model_len} tokens",
                *(-(-len(text) // _CHARACTERS_A_TOKEN), 1, self._plan.max_model_len),
            )

    def check(self, number: int, ids: Sequence[int], params: SamplingParams) -> None:
        """Check that a request fits the model and the cache.

        Raises:
            ConfigError: it cannot be served; the message names its number.
        """
        longest, vocab = self._plan.max_model_len, self._plan.arch.vocab_size
        if not ids:
            raise ConfigError(f"prompt {number} is empty")
        if len(ids) >= longest:
            raise PromptTooLong(
                f"prompt {number} has {len(ids)} tokens: the context is {longest}, "
                f"so at most {longest - 1} leave room for output",
                *(len(ids), 1, longest),
            )
        if not 0 <= min(ids) <= max(ids) < vocab:
            raise ConfigError(f"prompt {number} contains a token id outside 0 .. {vocab - 1}")
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias", "bad_words_ids"):
            given = getattr(params, name) or ()
            if bad := [t for t in (chain(*given) if name == "bad_words_ids" else given) if not 0 <= t < vocab]:
                raise ConfigError(f"sampling.{name}={bad}: must lie in 0 .. {vocab - 1}")
        tokens = min(len(ids) + params.max_tokens, longest)
        if tokens > self._plan.room:
            raise PromptTooLong(
                f"prompt {number} may reach {tokens} tokens: cache.num_blocks={self._plan.num_blocks} of "
                f"{self._plan.block_size} hold {self._plan.room}; raise it, or lower sampling.max_tokens",
                *(len(ids), tokens - len(ids), self._plan.room),
            )

    def check_limits(self, params: SamplingParams, is_met: bool) -> None:
        """Check that the rules in params that forbid tokens leave some output possible.

        Args:
            params: the request's sampling parameters.
            is_met: whether some output satisfies both the structured outputs, if any, and the other rules.

        Raises:
            ConfigError: no output is possible; the message names the rules.
        """
        arch, names = self._plan.arch, params.limits
        if not is_met:
            raise ConfigError(f"sampling.{', '.join(names)}: no output satisfies both this and structured_outputs")
        if params.structured_outputs is None and params.allowed_token_ids is not None:
            banned = {ids[0] for ids in params.bad_words_ids if len(ids) == 1}
            banned |= {*arch.eos_token_ids, *params.stop_token_ids} if params.min_tokens else set()
            if banned.issuperset(params.allowed_token_ids):
                raise ConfigError(f"sampling.allowed_token_ids: {' or '.join(names[1:])} forbids all of them")

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self.tokenizer, self._plan.arch.vocab_size, self._plan.arch.eos_token_ids)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Conversation | Mapping):
        return [prompts]
    many = list(prompts)
    if many and all(_is_id(p) for p in many):
        return [many]  # type: ignore[list-item]
    return many  # type: ignore[return-value]


def _plain(number: int, prompt: Prompt) -> Prompt:
    """Unwrap a mapping in vLLM's form, such as `{"prompt": "import os"}`; return any other prompt as is."""
    if not isinstance(prompt, Mapping):
        return prompt
    given = {key: value for key, value in prompt.items() if value is not None}
    text, ids = given.pop("prompt", None), given.pop("prompt_token_ids", None)
    if given or (text is None and ids is None):
        raise ConfigError(f"prompt {number} is a mapping with {[*given]}: must have prompt or prompt_token_ids alone")
    found: Prompt = text if ids is None else ids
    return found


def _ids(number: int, prompt: Prompt) -> list[int]:
    try:
        return [operator.index(token) for token in prompt]  # type: ignore[union-attr, arg-type]
    except TypeError:
        raise ConfigError(f"prompt {number} is neither a text nor a list of token ids") from None


def _is_id(value: object) -> bool:
    """Return whether `value` is an integer of any kind, including numpy's and torch's."""
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True
