"""Balances decodes over the micro-batches in flight, by predicted time."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...core.request import Request
from .linear_cost import TOKENS_FOR_TIME, LinearCost

_CLEARLY_SHORTER = 0.9  # ratio of predicted rounds below which fewer micro-batches are worth a change
_STILL_SHORTER = 0.93  # ratio up to which fewer are kept: a change costs a bubble
_WORTH_A_DELAY = 0.02  # decodes may exceed their share by this part of a micro-batch's time before any waits
_ALIKE = 1.01  # predicted rounds within this ratio are not worth a change


def round_seconds(stages: Sequence[LinearCost], groups: int, decodes: float, context: float, tile: int = 1) -> float:
    """Return the predicted time between two tokens of a request while only decodes run.

    `decodes` attend to `context` tokens in total and are distributed over `groups` micro-batches in flight. A request
    gets its next token when its micro-batch has passed every stage, and the slowest stage has computed all of them.
    """
    rows = -(-decodes / groups // tile) * tile if tile > 1 else decodes / groups
    through = slowest = 0.0
    for cost in stages:
        seconds = cost.constant + cost.per_token * rows + (cost.per_row * decodes + cost.per_context * context) / groups
        through += seconds
        slowest = max(slowest, seconds)
    return max(through, groups * slowest)


def best_groups(stages: Sequence[LinearCost], most: int, now: int, decodes: int, context: int, tile: int = 1) -> int:
    """Return the number of micro-batches, up to `most`, that minimizes the time between tokens with decodes only.

    It is `most` unless fewer are clearly better, and `now` if the best number is hardly better. With equal stages and
    at most one micro-batch per stage, more are never worse. But if one stage is slower or the depth exceeds the number
    of stages, and half of the decodes take a stage as long as all, each further micro-batch lengthens the slowest
    stage's round.
    """
    rounds = [round_seconds(stages, k, decodes, context, tile) for k in range(1, min(most, decodes) + 1)]
    shortest = min(rounds)
    if shortest >= (_CLEARLY_SHORTER if now == most else _STILL_SHORTER) * rounds[-1]:
        return most
    if now <= len(rounds) and rounds[now - 1] <= _ALIKE * shortest:
        return now
    return 1 + max([k for k, seconds in enumerate(rounds) if seconds == shortest])


class DecodeDealer:
    """Distributes decodes over the micro-batches in flight so that each has the same predicted decode time.

    A decode with a long context takes longer, so its micro-batch gets fewer decodes. Before the first fit all decodes
    count the same. A decode left for the next micro-batch gets its token one micro-batch later, so decodes that came
    back together stay together if they hardly exceed their share.

    Args:
        most: micro-batches in flight.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.groups = most  # micro-batches that share the decodes while no prompt tokens are left to dispatch
        self._seconds = 0.0  # of all decodes, ready and in flight, in the slowest stage
        self._count = 0
        self._next_survey = 0  # number of the micro-batch at which decodes are surveyed again
        self._cost = LinearCost(TOKENS_FOR_TIME)

    def survey(
        self, number: int, running: Iterable[Request], cost: LinearCost, stages: Sequence[LinearCost], tile: int
    ) -> None:
        """Survey all decodes, once per round of micro-batches: contexts hardly change within a round.

        Args:
            number: number of the micro-batch to fill; repeated if nothing was ready.
            running: admitted requests; only the decoding ones count.
            cost: cost of the slowest stage for a typical micro-batch.
            stages: costs of all stages; empty before the first fit.
            tile: rows that GEMMs pad to; 1 if the fit in use counts single tokens.
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
        """Mean seconds that a decode adds in the slowest stage; 1 if decodes cost nothing."""
        return self._seconds / self._count if self._seconds > 0.0 else 1.0

    def seconds(self, context: int) -> float:
        """Return the seconds that a decode with `context` tokens adds; 1 if decodes cost nothing."""
        cost = self._cost
        return cost.per_token + cost.per_row + cost.per_context * context if self._seconds > 0.0 else 1.0

    def _slack(self, depth: int, seconds: float | None) -> float:
        """Return the seconds by which decodes may exceed their share and stay together; 0 before the first fit."""
        if self._seconds <= 0.0:
            return 0.0
        return _WORTH_A_DELAY * (self._cost.constant + self._seconds / depth if seconds is None else seconds)

    def share(self, ready: Sequence[Request], depth: int, count: int, most: int, seconds: float | None) -> int:
        """Return how many of the ready decodes go into the next micro-batch.

        Args:
            ready: ready decodes, first ready first.
            depth: micro-batches that share the decodes.
            count: number of decodes, ready and in flight.
            most: number of decodes that there is room for.
            seconds: predicted time of the micro-batch; None if it contains only decodes.
        """
        if not ready or most <= 0:
            return 0
        mean = self.mean
        owed = max(mean, mean * count / depth)
        all_ready = 0.0
        for request in ready:
            all_ready += self.seconds(request.num_dispatched)
        if all_ready <= owed + max(0.5 * mean, self._slack(depth, seconds)):  # came back together, and stay so
            return min(len(ready), most)
        taken = 0
        for request in ready:
            one = self.seconds(request.num_dispatched)
            if taken == most or (taken and owed < 0.5 * one):
                break
            owed -= one
            taken += 1
        return taken
