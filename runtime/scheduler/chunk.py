"""The chunk size C, given or picked as the run goes (paper 4.4)."""

from __future__ import annotations

from typing import Literal

from ..request import Request
from ..stage_times import StageTimes

_FIRST = 256  # before anything is known: near saturation for most models and GPUs (paper, Figure 4 and 4.4)
_TRIED = (1.0, 0.5, 2.0, 0.25)  # of the first: sizes that tell a micro-batch's fixed cost from that of its tokens
_TRIES = 16  # micro-batches that do so
_SATURATED = 0.875  # of peak prefill throughput: what the paper calls marginally less (4.1)
_ENOUGH = 0.97  # of it: larger chunks only delay decodes
_EVERY = 64  # micro-batches between looks
_CHANGE = 0.25  # a smaller change is not worth it


class ChunkPicker:
    """`chunk` is what was given, or for `auto` follows (B-1) x P:D within what saturates the slowest stage.

    With C = (B-1) x P:D every decode rides along with a chunk, and every chunk has B-1 decodes to carry (5.1.4). Below
    saturation a smaller C wastes compute; above it a larger one only delays decodes.
    """

    def __init__(self, chunk: int | Literal["auto"], batch: int, tile: int, times: StageTimes) -> None:
        self.is_auto = chunk == "auto"
        self.chunk = _aligned(_FIRST, tile) if chunk == "auto" else chunk
        self._batch = batch
        self._tile = tile
        self._times = times
        self._looks = 0
        self._picked = False  # by what was learned; before that, tried
        self._prompt_tokens = self._output_tokens = 0  # of finished requests

    def finished(self, request: Request) -> None:
        self._prompt_tokens += request.prompt_len
        self._output_tokens += request.num_output

    def update(self) -> str | None:
        """Called once a micro-batch; what was picked and why, in one line, where that changed."""
        if not self.is_auto:
            return None
        self._looks += 1
        if self._looks <= _TRIES:
            self.chunk = _aligned(round(_FIRST * _TRIED[self._looks % len(_TRIED)]), self._tile)
            return None
        if self._times.is_fitted and (not self._picked or self._looks % _EVERY == 0):
            return self._pick()
        return None

    def _pick(self) -> str | None:
        saturated, enough = self.tokens_at(_SATURATED), self.tokens_at(_ENOUGH)
        low, high = _aligned(saturated, self._tile), _aligned(enough, self._tile)
        if self._output_tokens:
            ratio = self._prompt_tokens / self._output_tokens
            balanced = round((self._batch - 1) * ratio)
            chunk = min(high, max(low, _aligned(balanced, self._tile)))
            why = f"(B-1) x P:D = {self._batch - 1} x {ratio:.3g} = {balanced}"
        else:
            chunk, why = min(high, max(low, _aligned(_FIRST, self._tile))), "no request has ended yet, P:D is unknown"
        if self._picked and abs(chunk - self.chunk) <= _CHANGE * self.chunk:
            return None
        self.chunk, self._picked = chunk, True
        return (
            f"chunk=auto: {chunk} tokens (tile {self._tile}): {why}; a stage is at {_SATURATED:.1%} of its prefill "
            f"speed from {saturated} tokens on and at {_ENOUGH:.0%} from {enough}"
        )

    def tokens_at(self, share: float) -> int:
        """Tokens of a micro-batch at which the slowest stage has that share of its peak prefill throughput."""
        assert self._times.weights is not None
        constant, token = max(self._times.weights[:, :2].tolist(), key=lambda w: w[0] + _FIRST * w[1])
        if token <= 0.0:
            return _FIRST
        return max(1, min(1 << 16, round(share / (1 - share) * constant / token)))


def _aligned(tokens: int, tile: int) -> int:
    """The next multiple of the tile."""
    return max(1, -(-tokens // tile)) * tile
