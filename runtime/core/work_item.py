"""A request of a workload, before it is submitted to a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from .prefix_ids import PrefixIds


class WorkItem(msgspec.Struct, frozen=True):
    """One request: token ids of its `prompt`, exactly `output_len` output tokens, `arrival` seconds from the start.

    `deadline` is the time from arrival within which the first token is due, in seconds; None: no deadline. `user` is
    "" if the workload has one user. A lower `priority` is more urgent. In simulations the prompt is all zeros, and
    `prefix` identifies the tokens that it shares with others.
    """

    prompt: Sequence[int]
    output_len: int
    arrival: float
    user: str = ""
    deadline: float | None = None
    prefix: PrefixIds | None = None
    priority: int = 0
