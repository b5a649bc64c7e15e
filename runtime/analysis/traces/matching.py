"""Which micro-batch of one stage is which of the next, and what their sends and receives were: wait or transfer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .rank_trace import Transfer
from .stage_spans import StageSpan

_FARTHEST = 64  # micro-batches by which one rank's trace may begin or end before another's


@dataclass(frozen=True, slots=True)
class MatchedTransfer:
    """A send and its receive; seconds, both sides on one clock.

    A receive is a wait until both sides stand, and a transfer from then on: `wait` + `transfer` are its seconds.
    `sender_wait` is how long the sender stood before the receiver did.
    """

    send: Transfer
    receive: Transfer

    @property
    def stood(self) -> float:
        """When both sides stood, within the receive."""
        return min(max(self.send.start, self.receive.start), self.receive.end)

    @property
    def wait(self) -> float:
        """Seconds of the receive until both sides stood."""
        return self.stood - self.receive.start

    @property
    def transfer(self) -> float:
        """Seconds of the receive from then on."""
        return self.receive.end - self.stood

    @property
    def sender_wait(self) -> float:
        """Seconds that the sender stood before the receiver did; 0 where the receiver was first."""
        return max(0.0, min(self.receive.start, self.send.end) - self.send.start)


def shift_between(upstream: Sequence[StageSpan], downstream: Sequence[StageSpan]) -> int:
    """Return the d for which `upstream[i]` and `downstream[i + d]` are one micro-batch.

    A rank's trace may begin or end some micro-batches before another's. What the traces say of both decides: labels
    and token counts, bytes of their transfers, and that a stage computes nothing before the one ahead of it has. Of
    shifts that are as good the smallest counts.
    """
    spare = min(abs(len(upstream) - len(downstream)) + _FARTHEST // 2, _FARTHEST)
    shifts = sorted(range(-spare, spare + 1), key=abs)
    return max(shifts, key=lambda d: (_agreement(upstream, downstream, d), -abs(d)))


def _agreement(upstream: Sequence[StageSpan], downstream: Sequence[StageSpan], shift: int) -> tuple[float, int]:
    """Return the share of pairs that agree, less the share of those that do not, and the number of pairs."""
    first, last = max(0, -shift), min(len(upstream), len(downstream) - shift)
    pairs = [(upstream[i], downstream[i + shift]) for i in range(first, last)]
    if not pairs or len(pairs) < min(len(upstream), len(downstream)) // 2:
        return -2.0, 0
    return round(sum(_agree(*pair) for pair in pairs) / len(pairs), 2), len(pairs)


def _agree(upstream: StageSpan, downstream: StageSpan) -> int:
    """Return 1 if two spans may be of one micro-batch, else -1."""
    if upstream.step.label and downstream.step.label and upstream.step.has_tokens and downstream.step.has_tokens:
        return 1 if upstream.step.label == downstream.step.label else -1
    sent = [send.bytes for send in upstream.sends]
    got = [receive.bytes for receive in downstream.receives]
    if sent and got and None not in sent and None not in got and sent != got:
        return -1
    return 1 if downstream.begin >= upstream.end else -1


def match_transfers(upstream: StageSpan, downstream: StageSpan) -> list[MatchedTransfer]:
    """Return the transfers of one micro-batch, in their order; none where the two sides differ in their number."""
    if len(upstream.sends) != len(downstream.receives):
        return []
    return [MatchedTransfer(*pair) for pair in zip(upstream.sends, downstream.receives, strict=True)]
