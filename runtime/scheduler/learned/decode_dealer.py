"""Over how many micro-batches in flight decodes are dealt, and how many of them go into the next, by predicted time."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...core.request import Request
from .linear_cost import TOKENS_FOR_TIME, LinearCost

_CLEARLY_SHORTER = 0.9  # ratio of two predicted rounds from which on fewer micro-batches are worth a change
_STILL_SHORTER = 0.93  # ratio up to which they are kept: a change costs a bubble
_WORTH_A_DELAY = 0.02  # share of a micro-batch's time by which decodes must exceed theirs before any of them waits
_ALIKE = 1.01  # ratio of two predicted rounds that are not worth a change


def round_seconds(stages: Sequence[LinearCost], groups: int, decodes: float, context: float, tile: int = 1) -> float:
    """Return the predicted time between two tokens of a request, where only decodes run.

    `decodes`, which attend to `context` tokens in sum, are dealt over `groups` micro-batches in flight. A token comes
    round when its micro-batch has passed every stage, but not before the slowest stage has computed every micro-batch.
    """
    rows = -(-decodes / groups // tile) * tile if tile > 1 else decodes / groups
    through = slowest = 0.0
    for cost in stages:
        seconds = cost.constant + cost.per_token * rows + (cost.per_row * decodes + cost.per_context * context) / groups
        through += seconds
        slowest = max(slowest, seconds)
    return max(through, groups * slowest)


def best_groups(stages: Sequence[LinearCost], most: int, now: int, decodes: int, context: int, tile: int = 1) -> int:
    """Return the number of micro-batches, `most` at most, over which decodes alone come round the soonest.

    It is `most` unless fewer are clearly better, and `now` where the best number is hardly better. With equal stages
    and no more micro-batches than stages, more are never worse. Where one stage is slower than the others or the depth
    exceeds the stages, and a stage takes as long for half of the decodes, each further micro-batch makes the slowest
    stage's round longer.
    """
    rounds = [round_seconds(stages, k, decodes, context, tile) for k in range(1, min(most, decodes) + 1)]
    shortest = min(rounds)
    if shortest >= (_CLEARLY_SHORTER if now == most else _STILL_SHORTER) * rounds[-1]:
        return most
    if now <= len(rounds) and rounds[now - 1] <= _ALIKE * shortest:
        return now
    return 1 + max([k for k, seconds in enumerate(rounds) if seconds == shortest])


class DecodeDealer:
    """Deals decodes over the micro-batches in flight so that each has the same predicted time of them.

    A decode on a long context takes longer, so its micro-batch holds fewer. Before the first fit each decode counts
    alike. A decode that is left for the next micro-batch has its token a micro-batch later. Where the decodes that came
    back together are hardly more than their share, as few are beside a chunk, they stay together.

    Args:
        most: micro-batches in flight.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.groups = most  # micro-batches over which decodes are dealt while no prompt tokens are to be dispatched
        self._seconds = 0.0  # of all decodes, ready and in flight, in the slowest stage
        self._count = 0
        self._next_survey = 0  # number of the micro-batch before which the decodes are surveyed again
        self._cost = LinearCost(TOKENS_FOR_TIME)

    def survey(
        self, number: int, running: Iterable[Request], cost: LinearCost, stages: Sequence[LinearCost], tile: int
    ) -> None:
        """Take stock of all decodes, once in a round of micro-batches: contexts hardly change within one.

        Args:
            number: of the micro-batch that is to be filled. It may be the same several times, where nothing was ready.
            running: admitted requests, of which those that decode count.
            cost: of the stage that is slowest for a typical micro-batch.
            stages: costs of all stages; empty before the first fit.
            tile: rows that matrix products pad to; 1 where the fit in use counts single tokens.
        """
        if number < self._next_survey and cost is self._cost:
            return
        self._next_survey, self._cost = number + self.most, cost
        count = context = 0
        for request in running:
            if not request.remaining_prefill:
                count += 1
                context += request.num_dispatched
        self._count, self._seconds = count, (cost.per_token + cost.per_row) * count + cost.per_context * context
        if stages and count:
            self.groups = best_groups(stages, self.most, self.groups, count, context, tile)

    @property
    def mean(self) -> float:
        """Seconds that a decode adds in the slowest stage, on average."""
        return self._seconds / self._count if self._seconds > 0.0 else 1.0

    def seconds(self, context: int) -> float:
        """Return the seconds that a decode adds which attends to `context` tokens; alike where none costs anything."""
        cost = self._cost
        return cost.per_token + cost.per_row + cost.per_context * context if self._seconds > 0.0 else 1.0

    def _slack(self, depth: int, seconds: float | None) -> float:
        """Return the seconds by which decodes may exceed their share and stay together; 0 before the first fit."""
        if self._seconds <= 0.0:
            return 0.0
        return _WORTH_A_DELAY * (self._cost.constant + self._seconds / depth if seconds is None else seconds)

    def share(self, ready: Sequence[Request], depth: int, count: int, most: int, seconds: float | None) -> int:
        """Return how many of the decodes that are ready, first ready first, go into the next micro-batch.

        Args:
            ready: these decodes, in that order.
            depth: micro-batches that the decodes are dealt over.
            count: decodes, ready and in flight.
            most: decodes that there is room for.
            seconds: predicted time of the micro-batch; None if it holds decodes only.
        """
        if not ready or most <= 0:
            return 0
        mean = self.mean
        owed = max(mean, mean * count / depth)
        all_ready = 0.0
        for request in ready:
            all_ready += self.seconds(request.num_dispatched)
        if all_ready <= owed + max(0.5 * mean, self._slack(depth, seconds)):  # those that came back together stay so
            return min(len(ready), most)
        taken = 0
        for request in ready:
            one = self.seconds(request.num_dispatched)
            if taken == most or (taken and owed < 0.5 * one):
                break
            owed -= one
            taken += 1
        return taken
