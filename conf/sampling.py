"""Sampling parameters, under vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from .errors import ConfigError
from .ranges import SHARE, Within, check_ranges
from .reasoning import Reasoning
from .structured_outputs import StructuredOutputs

_INTEGERS = ("n", "max_tokens", "min_tokens", "top_k")
_MAX_BAD_WORDS = 1024
_MAX_TOKENS = (1 << 31) - 1
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request.

    Without a `seed`, one is derived from the run's seed and the request's index. `logprobs` are computed after
    penalties and before temperature and truncation; `prompt_logprobs` are the model's raw log-probabilities.

    Raises:
        ConfigError: a value is invalid; the message names the key.
    """

    n: Annotated[int, Within(1, 16384)] = 1
    """outputs per prompt"""
    max_tokens: Annotated[int, Within(1, _MAX_TOKENS)] = 128
    """maximum output tokens"""
    min_tokens: int = 0
    """minimum output tokens before an output may stop"""
    temperature: float = 0.0
    """sampling temperature; 0: greedy"""
    top_p: Annotated[float, Within(0, 1, open=True)] = 1.0
    """nucleus sampling: the smallest set of tokens whose cumulative probability reaches this"""
    top_k: Annotated[int, Within(0, _MAX_TOKENS)] = 0
    """sample from the k most likely tokens; 0: all"""
    min_p: Annotated[float, SHARE] = 0.0
    """minimum probability relative to the most likely token"""
    seed: int | None = None
    """random seed; outputs are independent of batch, policy, tp and pp; null: derived from the run's seed"""
    repetition_penalty: float = 1.0
    """above 1 penalizes tokens of the prompt and the output"""
    presence_penalty: Annotated[float, Within(-2, 2)] = 0.0
    """above 0 penalizes tokens that occur in the output"""
    frequency_penalty: Annotated[float, Within(-2, 2)] = 0.0
    """above 0 penalizes tokens of the output per occurrence"""
    stop: tuple[str, ...] = ()
    """stop strings"""
    stop_token_ids: tuple[int, ...] = ()
    """stop token ids"""
    include_stop_str_in_output: bool = False
    """include the stop string in the output"""
    skip_special_tokens: bool = True
    """omit special tokens, such as end-of-sequence, from the text"""
    ignore_eos: bool = False
    """continue past the end-of-sequence token"""
    logprobs: Annotated[int | None, Within(0, 64)] = None
    """number of most likely tokens to return log-probabilities for (0: the sampled token only); null: none"""
    prompt_logprobs: Annotated[int | None, Within(0, 64)] = None
    """the same for each prompt token except the first; null: none"""
    logit_bias: dict[int, float] | None = field(default=None, hash=False)
    """-100 to 100 by token id, added to the logits; null: none"""
    allowed_token_ids: tuple[int, ...] | None = None
    """token ids that may be sampled; null: all"""
    bad_words: tuple[str, ...] = ()
    """words that must not occur in an output, at its start or after a space"""
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    """the same as token id sequences: the last id is not sampled right after the others"""
    structured_outputs: StructuredOutputs | None = None  # a mapping of its keys is converted
    """constraint on the text (guided decoding); null: none"""
    reasoning: Reasoning | None = None
    """reasoning delimiters and budget; null: none"""
    shown_special_ids: tuple[int, ...] = ()
    """special token ids that are kept in the text despite skip_special_tokens"""

    def __post_init__(self) -> None:
        if isinstance(self.structured_outputs, Mapping):
            object.__setattr__(self, "structured_outputs", StructuredOutputs.of(self.structured_outputs))
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words", "bad_words_ids", "shown_special_ids"):
            value = getattr(self, name)
            value = (value,) if isinstance(value, str | int) else tuple(value or ())
            if name == "allowed_token_ids" and getattr(self, name) is None:
                continue
            object.__setattr__(self, name, value)
        sequences = [tuple(ids) if isinstance(ids, list | tuple) else () for ids in self.bad_words_ids]
        given = [name for name in ("seed", "logprobs", "prompt_logprobs") if getattr(self, name) is not None]
        for names, kind, right in (((*_INTEGERS, *given), int, "an integer"), (_NUMBERS, int | float, "a number")):
            for name in names:
                value = getattr(self, name)
                if not isinstance(value, kind) or isinstance(value, bool):
                    raise ConfigError(f"sampling.{name}={value!r}: must be {right}")
        if self.top_k == -1:  # "all" in vLLM
            object.__setattr__(self, "top_k", 0)
        biases = self.logit_bias or {}
        if not isinstance(biases, dict):
            raise ConfigError(f"sampling.logit_bias={biases!r}: must be null or map token ids to -100 .. 100")
        check_ranges(self, "sampling.")
        rules = [
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "between 0 and max_tokens"),
            ("temperature", self.temperature == 0 or 1e-30 <= self.temperature <= 1e30, "0 (greedy) or 1e-30 to 1e30"),
            ("seed", self.seed is None or -(1 << 63) <= self.seed < 1 << 63, "null or a 64-bit integer"),
            ("repetition_penalty", 1e-6 <= self.repetition_penalty <= 1e6, "1e-6 to 1e6"),
            ("stop", all(isinstance(s, str) and s for s in self.stop), "non-empty strings"),
            ("stop_token_ids", all(map(_is_id, self.stop_token_ids)), "token ids"),
            (
                "allowed_token_ids",
                self.allowed_token_ids is None or (self.allowed_token_ids and all(map(_is_id, self.allowed_token_ids))),
                "null (all) or a non-empty list of token ids",
            ),
            ("shown_special_ids", all(map(_is_id, self.shown_special_ids)), "token ids"),
            (
                "bad_words",
                len(self.bad_words) <= _MAX_BAD_WORDS and all(isinstance(w, str) and w.strip() for w in self.bad_words),
                f"at most {_MAX_BAD_WORDS} non-blank words",
            ),
            ("bad_words_ids", all(ids and all(map(_is_id, ids)) for ids in sequences), "lists of token ids"),
            ("logit_bias", all(_is_bias(*pair) for pair in biases.items()), "-100 to 100 by token id"),
            (
                "structured_outputs",
                isinstance(self.structured_outputs, StructuredOutputs | None),
                "null, StructuredOutputs or a mapping of its keys",
            ),
        ]
        for name, holds, right in rules:
            if not holds:
                raise ConfigError(f"sampling.{name}={getattr(self, name)!r}: must be {right}")
        object.__setattr__(self, "bad_words_ids", tuple(sequences))
        object.__setattr__(self, "logit_bias", {int(token): float(bias) for token, bias in biases.items()} or None)
        wanted, reasoning = self.structured_outputs, self.reasoning
        if wanted is not None and not wanted.after and reasoning is not None and reasoning.begin:
            raise ConfigError(
                f"sampling.reasoning.begin={reasoning.begin!r}: must be empty with structured_outputs, "
                "since an output may or may not start with it; or set structured_outputs.after"
            )
        if self.structured_outputs is not None and self.ignore_eos:
            raise ConfigError(
                "sampling.ignore_eos=True: must be false with structured_outputs, which end with that token"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether sampling is greedy: the temperature is 0."""
        return self.temperature == 0.0

    @property
    def limits(self) -> list[str]:
        """The given fields that forbid tokens, except `structured_outputs`."""
        given = {"allowed_token_ids": self.allowed_token_ids, "bad_words": self.bad_words_ids}
        return [name for name, value in (given | {"min_tokens": self.min_tokens}).items() if value]

    @property
    def edits_logits(self) -> bool:
        """Whether logits are edited by a rule that is independent of previous tokens."""
        return self.logit_bias is not None or bool(self.allowed_token_ids)

    @property
    def depends_on_past(self) -> bool:
        """Whether logits depend on previous tokens, which the sampler must then track."""
        return self.has_penalties or bool(self.bad_words_ids) or self.has_masks

    @property
    def has_masks(self) -> bool:
        """Whether tokens are masked by previous tokens: structured outputs or a reasoning budget."""
        limits = self.reasoning is not None and self.reasoning.max_tokens is not None
        return limits or self.structured_outputs is not None

    @property
    def has_penalties(self) -> bool:
        """Whether a repetition, presence or frequency penalty is set."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _is_id(token: object) -> bool:
    return type(token) is int


def _is_bias(token: object, bias: object) -> bool:
    """Return whether `token` is a token id (an integer, or digits as in JSON keys) and `bias` is in range."""
    is_id = token.isdecimal() and len(token) < 20 if isinstance(token, str) else type(token) is int
    return is_id and isinstance(bias, int | float) and not isinstance(bias, bool) and -100 <= bias <= 100
