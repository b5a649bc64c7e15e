"""Draft tokens for the decodes of a micro-batch: how many, and whether they pay off."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from collections.abc import Sequence

from ..core.block_pool import BlockPool
from ..core.features import Features, features, weigh_all
from ..core.messages import Span
from ..core.micro_batch import MicroBatch
from ..core.request import Request
from ..core.run_record import MicroBatchRecord
from .learned.stage_fit import StageFit
from .prompt_lookup import LONGEST, PromptLookup

_FIRST_TRIALS = 16  # micro-batches with draft tokens before their cost is trusted; until then they fill the room
_REST = 8  # decodes without a guess for a request whose draft tokens do not pay off
_FIRST_RATE = 0.5  # acceptance rate assumed before any token was verified
_PRIOR_WEIGHT = 2.0  # in tokens: weight of the rate over all requests in one request's rate
_MEMORY = 32.0  # verified tokens of one request after which an observation counts 1/e
_MEMORY_OF_ALL = 1024.0


class AcceptanceRate:
    """Acceptance rate of draft tokens, given that all before them were accepted. Old observations fade."""

    def __init__(self, memory: float) -> None:
        self._keep = 1.0 - 1.0 / memory
        self._accepted = 0.0
        self._tried = 0.0

    def observe(self, accepted: int, rejected: int) -> None:
        """Count one guess's accepted draft tokens, and the rejected one, if any."""
        for is_accepted in [1.0] * accepted + [0.0] * rejected:
            self._accepted = self._keep * self._accepted + is_accepted
            self._tried = self._keep * self._tried + 1.0

    def given(self, prior: float) -> float:
        """Return the rate, with `prior` counted as a few tokens."""
        return (self._accepted + _PRIOR_WEIGHT * prior) / (self._tried + _PRIOR_WEIGHT)


class _Follower:
    """One request's tokens, its last guess, and its acceptance rates."""

    def __init__(self) -> None:
        self.lookup = PromptLookup()
        self.guess: list[int] = []  # of the tokens after those in `lookup`
        self.length = 0  # of the n-gram that the guess is from
        self.rates = [AcceptanceRate(_MEMORY) for _ in range(LONGEST + 1)]  # by length of the n-gram
        self.rest = 0  # decodes left without a guess


class SpeculativeDecoding:
    """Adds up to `most` draft tokens per decode, which the stages verify in the same pass.

    A draft token is one more row of its micro-batch. It pays off if the micro-batch then yields more tokens per second:
    if its acceptance probability exceeds the cost of its row relative to the micro-batch's time per token. The cost is
    learned from the run's spans. The probability is learned from guesses, dispatched or not: each is compared with the
    tokens that the model then samples.
    """

    def __init__(self, most: int, num_stages: int) -> None:
        self.most = most
        self._fit = StageFit(num_stages)
        self._num_tried = 0  # micro-batches with draft tokens whose times are known
        self._rates = [AcceptanceRate(_MEMORY_OF_ALL) for _ in range(LONGEST + 1)]
        self._followers: dict[int, _Follower] = {}

    @property
    def num_followed(self) -> int:
        """Number of requests whose tokens are tracked."""
        return len(self._followers)

    def add(self, batch: MicroBatch, room: int, pool: BlockPool, num_running: int) -> None:
        """Add up to `room` draft tokens to the decodes of a micro-batch, the likeliest to be accepted first.

        Draft tokens preempt nothing and leave a KV block for each running request. Requests with penalties or
        structured outputs get none: their sampling depends on the tokens accepted before.
        """
        least = self._least_rate(batch, room)
        found: list[tuple[float, int]] = []
        for place, request in enumerate(batch.decodes):
            if (rate := self._guess(request)) > 0.0:
                if rate >= least:
                    found.append((-rate, place))
                else:
                    self._followers[request.id].rest = _REST
        found.sort()
        for negative_rate, place in found:
            request = batch.decodes[place]
            guess = self._followers[request.id].guess
            count, probability = 0, -negative_rate
            while count < min(room, len(guess)) and probability >= least:
                count += 1
                probability *= -negative_rate
            count = _within(pool, request, count, num_running)
            if count > 0:
                batch.draft_tokens[request.id] = guess[:count]
                room -= count

    def observe(self, micro_batch: MicroBatchRecord, spans: Sequence[Span]) -> None:
        """Learn from the spans of one or several stages that have computed a micro-batch."""
        stages, seconds = [span.stage for span in spans], [span.end - span.begin for span in spans]
        self._fit.observe(features(micro_batch), stages, seconds)
        if micro_batch.drafts and spans[-1].stage == self._fit.num_stages - 1:
            self._num_tried += 1

    def finished(self, request: Request) -> None:
        """Forget a request."""
        self._followers.pop(request.id, None)

    def _guess(self, request: Request) -> float:
        """Guess a request's next tokens. Return the first one's acceptance probability; 0.0 without a guess."""
        if request.params.depends_on_past:
            return 0.0
        follower = self._followers.get(request.id)
        if follower is None:
            follower = self._followers[request.id] = _Follower()
        if follower.rest > 0:
            follower.rest -= 1
            return 0.0
        self._catch_up(follower, request)
        most = min(self.most, request.max_len - request.num_tokens - 1)
        if most < 1:
            return 0.0
        if isinstance(request.prompt, bytes):  # simulated: its text is not known
            follower.length, follower.guess = LONGEST, [0] * most
        else:
            follower.length, follower.guess = follower.lookup.guess(most)
        if not follower.guess:
            return 0.0
        of_all = self._rates[follower.length].given(_FIRST_RATE)
        return follower.rates[follower.length].given(of_all)

    def _catch_up(self, follower: _Follower, request: Request) -> None:
        """Compare the last guess with the tokens sampled since, and append them to the lookup."""
        tokens = request.tokens_in(len(follower.lookup), request.num_tokens)
        known = min(len(follower.guess), len(tokens))
        right = 0
        while right < known and follower.guess[right] == tokens[right]:
            right += 1
        wrong = int(right < known)
        follower.rates[follower.length].observe(right, wrong)
        self._rates[follower.length].observe(right, wrong)
        follower.lookup.extend(tokens)
        follower.guess = []

    def _least_rate(self, batch: MicroBatch, room: int) -> float:
        """Return the acceptance probability from which a draft token pays off."""
        weights = self._fit.by_stage
        if weights is None or self._num_tried < _FIRST_TRIALS:
            return 0.0
        count = len(batch.decodes)
        context = sum([request.num_dispatched for request in batch.decodes])
        prefix = sum([chunk.start * chunk.length for chunk in batch.chunks])
        squared = sum([chunk.length * chunk.length for chunk in batch.chunks])
        sampled = count + sum([chunk.ends_prefill for chunk in batch.chunks])
        without = weigh_all(weights, Features(1.0, batch.num_tokens, prefix, squared, context, sampled))
        a_row = weigh_all(weights, Features(0.0, 1.0, 0.0, 0.0, context / count, 1.0))
        with_drafts = [seconds + room * row for seconds, row in zip(without, a_row, strict=True)]
        slowest = with_drafts.index(max(with_drafts))
        return batch.num_tokens * a_row[slowest] / max(max(without), 1e-12)


def _within(pool: BlockPool, request: Request, count: int, num_running: int) -> int:
    """Return how many of a request's `count` draft tokens fit into the KV cache, and allocate their blocks."""
    own = len(request.blocks) * pool.block_size - request.num_tokens
    if count > own:
        blocks = -(-(request.num_tokens + count) // pool.block_size) - len(request.blocks)
        if pool.num_free < (blocks + num_running) * pool.num_groups:
            return own
        pool.extend(request, request.num_tokens + count)
    return count
