"""Matches micro-batches and transfers between adjacent stages, and splits receives into wait and transfer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .rank_trace import Transfer
from .stage_spans import StageSpan

_FARTHEST = 64  # micro-batches by which one rank's trace may begin or end before another's


@dataclass(frozen=True, slots=True)
class MatchedTransfer:
    """A send and its receive; seconds, both sides on one clock.

    A receive is a wait until both sides are ready, and a transfer from then on: `wait` + `transfer` is its duration.
    `sender_wait` is how long the sender waited for the receiver.
    """

    send: Transfer
    receive: Transfer

    @property
    def stood(self) -> float:
        """When both sides were ready, within the receive."""
        return min(max(self.send.start, self.receive.start), self.receive.end)

    @property
    def wait(self) -> float:
        """Seconds of the receive until both sides were ready."""
        return self.stood - self.receive.start

    @property
    def transfer(self) -> float:
        """Seconds of the receive from then on."""
        return self.receive.end - self.stood

    @property
    def sender_wait(self) -> float:
        """Seconds that the sender waited for the receiver; 0 if the receiver was ready first."""
        return max(0.0, min(self.receive.start, self.send.end) - self.send.start)


def shift_between(upstream: Sequence[StageSpan], downstream: Sequence[StageSpan]) -> int:
    """Return the d for which `upstream[i]` and `downstream[i + d]` are the same micro-batch.

    A rank's trace may begin or end some micro-batches before another's. The shift is chosen by matching labels, bytes
    of transfers, and the order of compute: downstream begins after upstream ends. On a tie the smallest shift wins.
    """
    spare = min(abs(len(upstream) - len(downstream)) + _FARTHEST // 2, _FARTHEST)
    shifts = sorted(range(-spare, spare + 1), key=abs)
    return max(shifts, key=lambda d: (_agreement(upstream, downstream, d), -abs(d)))


def _agreement(upstream: Sequence[StageSpan], downstream: Sequence[StageSpan], shift: int) -> tuple[float, int]:
    """Return the share of pairs that agree minus the share that disagree, and the number of pairs."""
    first, last = max(0, -shift), min(len(upstream), len(downstream) - shift)
    pairs = [(upstream[i], downstream[i + shift]) for i in range(first, last)]
    if not pairs or len(pairs) < min(len(upstream), len(downstream)) // 2:
        return -2.0, 0
    return round(sum(_agree(*pair) for pair in pairs) / len(pairs), 2), len(pairs)


def _agree(upstream: StageSpan, downstream: StageSpan) -> int:
    """Return 1 if two spans may belong to one micro-batch, else -1."""
    if upstream.step.label and downstream.step.label and upstream.step.has_tokens and downstream.step.has_tokens:
        return 1 if upstream.step.label == downstream.step.label else -1
    sent = [send.bytes for send in upstream.sends]
    got = [receive.bytes for receive in downstream.receives]
    if sent and got and None not in sent and None not in got and sent != got:
        return -1
    return 1 if downstream.begin >= upstream.end else -1


def match_transfers(upstream: StageSpan, downstream: StageSpan) -> list[MatchedTransfer]:
    """Return the transfers of one micro-batch in order; none if the two sides differ in number."""
    if len(upstream.sends) != len(downstream.receives):
        return []
    return [MatchedTransfer(*pair) for pair in zip(upstream.sends, downstream.receives, strict=True)]
