"""Joins a micro-batch's tokens, of which each rank of the last stage samples a share."""

from __future__ import annotations

from ..core.messages import MicroBatchResult, Sampled


class SampledShares:
    """Keeps results of the last stage's ranks until all ranks with rows of the micro-batch have reported."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], dict[int, MicroBatchResult]] = {}  # by epoch and micro-batch, then by rank

    def clear(self) -> None:
        """Drop incomplete results."""
        self._kept.clear()

    def take(self, rank: int, result: MicroBatchResult) -> MicroBatchResult | None:
        """Add a rank's result. Return the micro-batch's result, or None while a share of its tokens is missing."""
        if result.sampled is None or result.sampled.num_shares == 1:
            return result
        key = result.epoch, result.micro_batch
        kept = self._kept.setdefault(key, {})
        kept[rank] = result
        if len(kept) < result.sampled.num_shares:
            return None
        del self._kept[key]
        results = [kept[each] for each in sorted(kept)]
        spans = [span for each in results for span in each.spans]
        return MicroBatchResult(*key, spans, _joined([each.sampled for each in results if each.sampled is not None]))


def _joined(shares: list[Sampled]) -> Sampled:
    """Return the shares' tokens in row order. A prompt's log-probabilities may be spread over several shares."""
    joined = Sampled([], {}, {})
    for share in shares:
        first = len(joined.tokens)
        joined.tokens.extend(share.tokens)
        joined.logprobs.update({first + place: logprobs for place, logprobs in share.logprobs.items()})
        for place, found in share.prompt_logprobs.items():
            joined.prompt_logprobs.setdefault(place, []).extend(found)
    return joined
