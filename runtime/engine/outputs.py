"""What a user gets back, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Logprob:
    """Of one token at one position; `rank` 1 is the most likely of the vocabulary."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One sampled continuation. `finish_reason`: stop, length or abort; None while it goes on.

    `token_ids` hold the token that ended it, `text` does not hold the stop string or the end-of-text token.
    `logprobs[i]` maps token ids to `Logprob`: the sampled token's and the best ones' that were asked for.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that was found
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its `n` continuations; a snapshot while `finished` is false. `index`: of the prompt in its call."""

    request_id: int
    index: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]

    @property
    def finished(self) -> bool:
        return all(o.finished for o in self.outputs)
