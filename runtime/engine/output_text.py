"""Incremental detokenization of one output."""

from __future__ import annotations

from collections.abc import Sequence

from ...conf.sampling import SamplingParams
from ...models.tokenizer import Detokenizer, Tokenizer
from ..core.messages import TokenLogprobs
from .outputs import CompletionOutput, Logprob
from .stopping import StopChecker


class OutputText:
    """Fills a `CompletionOutput`: decodes tokens, finds stop strings, adds token texts to log-probabilities."""

    def __init__(self, completion: CompletionOutput, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self.completion = completion
        self._params = params
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens, params.shown_special_ids)
        self._stop = StopChecker(params.stop, params.include_stop_str_in_output)
        if params.logprobs is not None:
            completion.logprobs = []
            completion.cumulative_logprob = 0.0

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stop.stop_string is not None

    def push(self, token: int, logprobs: TokenLogprobs | None, *, is_stop_token: bool) -> str:
        """Add a token; return the text that it made final. A stop token's text is not part of the output."""
        out = self.completion
        out.token_ids.append(token)
        if out.logprobs is not None:
            assert logprobs is not None, token
            out.logprobs.append(named(self._tokenizer, token, logprobs))
            out.cumulative_logprob = (out.cumulative_logprob or 0.0) + logprobs.logprob
        if is_stop_token:
            out.stop_reason = token if token in self._params.stop_token_ids else None
            return ""
        text, _ = self._stop.push(self._detokenizer.push(token), len(out.token_ids) >= self._params.min_tokens)
        out.text += text
        return text

    def add(self, token: int | None, logprobs: TokenLogprobs | None, reason: str | None) -> tuple[str, str | None]:
        """Apply an update from the engine: a token, a finish `reason`, or both.

        Returns:
            The text that became final, and the finish reason: the engine's, or "stop" for a stop string.
        """
        piece = ""
        if token is not None:
            piece = self.push(token, logprobs, is_stop_token=reason == "stop")
            reason = "stop" if self.stopped else reason
        if reason is not None:
            piece += self.finish(reason)
        return piece, reason

    def finish(self, reason: str | None) -> str:
        """Finish the output; return the text that was still held back."""
        out = self.completion
        rest = ""
        if not self.stopped:
            text, _ = self._stop.push(self._detokenizer.flush())
            rest = text + self._stop.flush()
            out.text += rest
        out.finish_reason = reason
        if self.stopped:
            out.stop_reason = self._stop.stop_string
        return rest


def named(tokenizer: Tokenizer, token: int, logprobs: TokenLogprobs) -> dict[int, Logprob]:
    """Return the log-probabilities of a token and of the most likely tokens, with their texts."""
    entries = [(token, logprobs.logprob, logprobs.rank)]
    entries += [(best, value, rank) for rank, (best, value) in enumerate(logprobs.top, 1)]
    return {
        number: Logprob(value, rank, tokenizer.decode([number], skip_special=False)) for number, value, rank in entries
    }


def unnamed(token: int, logprobs: dict[int, Logprob], num_top: int) -> TokenLogprobs:
    """Invert `named`: return the log-probabilities of a token and of the `num_top` most likely tokens."""
    own = logprobs[token]
    assert own.rank is not None
    best = sorted((one.rank or 0, number, one.logprob) for number, one in logprobs.items())
    return TokenLogprobs(own.logprob, own.rank, [(number, value) for _, number, value in best[:num_top]])


def named_prompt(
    tokenizer: Tokenizer, prompt: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> list[dict[int, Logprob] | None]:
    """Return the log-probabilities of a prompt's tokens, with None for the first."""
    return [None, *(named(tokenizer, token, each) for token, each in zip(prompt[1:], logprobs, strict=True))]
