"""The outputs returned to users, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of a token at a position. `rank` 1 is the most likely token of the vocabulary."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """A sampled continuation.

    `finish_reason` is stop, length, abort, or error if the logits are not finite (bad weights) or structured outputs
    became too complex; None while unfinished.

    `token_ids` include the token that ended it; `text` includes neither the stop string nor the end-of-text token.
    `logprobs[i]` maps the sampled token and the most likely tokens at position i to their `Logprob`. `cached_tokens`:
    prompt tokens found in the prefix cache.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that was found
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        """Whether the continuation has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its `n` continuations, a snapshot until `finished`. `index` is the prompt's index in its call.

    `prompt_logprobs[i]` maps prompt token i and the most likely tokens at i to their `Logprob`; None for the first
    token. They are available from the first output token on.
    """

    request_id: int
    index: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def finished(self) -> bool:
        """Whether all continuations have ended."""
        return all(o.finished for o in self.outputs)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the first continuation found in the prefix cache."""
        return self.outputs[0].cached_tokens
