"""The sampling parameters, under vLLM's names: how the next token of a request is picked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .errors import ConfigError
from .reasoning import Reasoning
from .structured_outputs import StructuredOutputs

_INTEGERS = ("n", "max_tokens", "min_tokens", "top_k")
_MAX_BAD_WORDS = 1024
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request.

    Without a `seed`, one is derived from the run's seed and the request's number. `logprobs` are taken after penalties
    and before temperature and truncation; `prompt_logprobs` are the model's own.

    Raises:
        ConfigError: a value is out of its range; the text names the key.
    """

    n: int = 1
    """outputs per prompt"""
    max_tokens: int = 128
    """most tokens an output may have"""
    min_tokens: int = 0
    """an output does not stop before this many tokens"""
    temperature: float = 0.0
    """0 is greedy: exactly the most likely token"""
    top_p: float = 1.0
    """sample from the fewest tokens whose probability reaches this"""
    top_k: int = 0
    """sample from the k most likely tokens; 0: all"""
    min_p: float = 0.0
    """drop tokens less likely than this times the most likely one"""
    seed: int | None = None
    """one seed gives one output, whatever the batch, policy, tp or pp; null: by the run's seed and the request"""
    repetition_penalty: float = 1.0
    """above 1 disfavours tokens of the prompt and the output"""
    presence_penalty: float = 0.0
    """above 0 disfavours tokens of the output, once"""
    frequency_penalty: float = 0.0
    """above 0 disfavours tokens of the output, each time again"""
    stop: tuple[str, ...] = ()
    """strings that end an output"""
    stop_token_ids: tuple[int, ...] = ()
    """token ids that end an output"""
    include_stop_str_in_output: bool = False
    """keep the stop string in the text"""
    skip_special_tokens: bool = True
    """leave special tokens, such as end-of-sequence, out of the text"""
    ignore_eos: bool = False
    """go on past the end-of-sequence token"""
    logprobs: int | None = None
    """log-probabilities of this many most likely tokens (0: of the sampled one only); null: none"""
    prompt_logprobs: int | None = None
    """the same for each token of the prompt but the first; null: none"""
    logit_bias: dict[int, float] | None = field(default=None, hash=False)
    """-100 to 100 by token id, added to the logits; null: none"""
    allowed_token_ids: tuple[int, ...] | None = None
    """the only token ids that may be sampled; null: all"""
    bad_words: tuple[str, ...] = ()
    """words that an output may not contain, at its start or after a space"""
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    """the same as sequences of token ids: the last id of a sequence is not sampled right after the others"""
    structured_outputs: StructuredOutputs | None = None  # or a mapping of its keys, which becomes one
    """what the text must match; null: nothing"""
    reasoning: Reasoning | None = None
    """what of the text is reasoning, and how much of it there may be; null: none"""
    shown_special_ids: tuple[int, ...] = ()
    """special token ids that stay in the text, though others are left out"""

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
        if self.top_k == -1:  # vLLM's word for all
            object.__setattr__(self, "top_k", 0)
        biases = self.logit_bias or {}
        if not isinstance(biases, dict):
            raise ConfigError(f"sampling.logit_bias={biases!r}: must be null or a mapping of token ids to -100 to 100")
        rules = [
            ("n", 1 <= self.n <= 16384, "1 to 16384"),
            ("max_tokens", 1 <= self.max_tokens < 1 << 31, "1 to 2147483647"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "between 0 and max_tokens"),
            ("temperature", self.temperature == 0 or 1e-30 <= self.temperature <= 1e30, "0 (greedy) or 1e-30 to 1e30"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("top_k", 0 <= self.top_k < 1 << 31, "0 (all) to 2147483647"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "in [0, 1]"),
            ("seed", self.seed is None or -(1 << 63) <= self.seed < 1 << 63, "null or an integer of 64 bits"),
            ("repetition_penalty", 1e-6 <= self.repetition_penalty <= 1e6, "1e-6 to 1e6"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "in [-2, 2]"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "in [-2, 2]"),
            ("stop", all(isinstance(s, str) and s for s in self.stop), "strings that are not empty"),
            ("stop_token_ids", all(map(_is_id, self.stop_token_ids)), "token ids"),
            (
                "allowed_token_ids",
                self.allowed_token_ids is None or (self.allowed_token_ids and all(map(_is_id, self.allowed_token_ids))),
                "null (all) or token ids, not empty",
            ),
            ("shown_special_ids", all(map(_is_id, self.shown_special_ids)), "token ids"),
            (
                "bad_words",
                len(self.bad_words) <= _MAX_BAD_WORDS and all(isinstance(w, str) and w.strip() for w in self.bad_words),
                f"at most {_MAX_BAD_WORDS} words that are not blank",
            ),
            ("bad_words_ids", all(ids and all(map(_is_id, ids)) for ids in sequences), "lists of token ids"),
            ("logit_bias", all(_is_bias(*pair) for pair in biases.items()), "-100 to 100 by token id"),
            (
                "structured_outputs",
                isinstance(self.structured_outputs, StructuredOutputs | None),
                "null, StructuredOutputs or a mapping of its keys",
            ),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 64, "null or 0 to 64"),
            ("prompt_logprobs", self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= 64, "null or 0 to 64"),
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
                "as nothing says whether an output begins with it; or set structured_outputs.after"
            )
        if self.structured_outputs is not None and self.ignore_eos:
            raise ConfigError(
                "sampling.ignore_eos=True: must be false with structured_outputs, which end with that token"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken: the temperature is 0."""
        return self.temperature == 0.0

    @property
    def limits(self) -> list[str]:
        """The fields given that forbid tokens, beside `structured_outputs`."""
        given = {"allowed_token_ids": self.allowed_token_ids, "bad_words": self.bad_words_ids}
        return [name for name, value in (given | {"min_tokens": self.min_tokens}).items() if value]

    @property
    def edits_logits(self) -> bool:
        """Whether a rule changes the logits that does not depend on the tokens so far."""
        return self.logit_bias is not None or bool(self.allowed_token_ids)

    @property
    def depends_on_past(self) -> bool:
        """Whether the tokens so far change the logits, so that the sampler must know them."""
        return self.has_penalties or bool(self.bad_words_ids) or self.has_masks

    @property
    def has_masks(self) -> bool:
        """Whether the tokens so far say which may come next: structured outputs, or a budget of reasoning."""
        limits = self.reasoning is not None and self.reasoning.max_tokens is not None
        return limits or self.structured_outputs is not None

    @property
    def has_penalties(self) -> bool:
        """Whether a penalty changes the logits of tokens that are in the text already."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _is_id(token: object) -> bool:
    return type(token) is int


def _is_bias(token: object, bias: object) -> bool:
    """Return whether `token` is a token id (an integer, or digits, as in JSON's keys) and `bias` is in its range."""
    is_id = token.isdecimal() and len(token) < 20 if isinstance(token, str) else type(token) is int
    return is_id and isinstance(bias, int | float) and not isinstance(bias, bool) and -100 <= bias <= 100
