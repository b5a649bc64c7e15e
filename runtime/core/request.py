"""A request's life in the coordinator: its tokens, and how far they are dispatched and completed."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from collections.abc import Sequence

from ...conf.sampling import SamplingParams
from .request_record import RequestRecord


class Request:
    """Prompt tokens plus sampling parameters, and what has become of them.

    Its tokens are `prompt` and then `output`. `num_dispatched` of them have their KV computed or under way,
    `num_completed` have it for sure; the difference is in flight. At `max_len` tokens, P + D at the longest, or with
    one of `stop_ids` it ends. `prefill_target` tokens enter as chunks: the prompt, or after a preemption all tokens
    known by then. A prompt of `bytes`, as simulations have, takes a byte a token. `user` and `deadline` (of the first
    token, seconds on the coordinator's clock) are for the orders that ask for them; `order_key` is the order's.
    `record` is what the coordinator notes of it.
    """

    __slots__ = (
        "blocks",
        "deadline",
        "eos_token_ids",
        "finish_reason",
        "id",
        "max_len",
        "num_blocks_sent",
        "num_completed",
        "num_dispatched",
        "order_key",
        "output",
        "params",
        "preemptions",
        "prefill_target",
        "prompt",
        "prompt_len",
        "record",
        "seed",
        "stop_ids",
        "user",
    )  # fmt: skip

    def __init__(
        self,
        id: int,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        arrival: float = 0.0,
        seed: int = 0,
        max_model_len: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        user: str = "",
        deadline: float | None = None,
    ) -> None:
        self.id = id
        self.prompt: Sequence[int] = prompt if isinstance(prompt, bytes) else list(prompt)
        self.prompt_len = len(prompt)
        self.output: list[int] = []
        self.params = params
        self.seed = seed
        self.eos_token_ids = eos_token_ids
        stop_ids = frozenset(params.stop_token_ids).union(() if params.ignore_eos else eos_token_ids)
        self.stop_ids: frozenset[int] | None = stop_ids or None
        longest = len(prompt) + params.max_tokens
        self.max_len = longest if max_model_len is None else min(longest, max_model_len)
        self.num_dispatched = 0
        self.num_completed = 0
        self.prefill_target = len(prompt)
        self.blocks: list[int] = []
        self.num_blocks_sent = 0
        self.preemptions = 0
        self.finish_reason: str | None = None
        self.user = user
        self.deadline = deadline
        self.order_key: float | None = None
        self.record = RequestRecord(id, len(prompt), arrival)

    def __repr__(self) -> str:
        return f"Request({self.id}, {self.num_completed}/{self.num_dispatched}/{self.num_tokens} of {self.max_len})"

    @property
    def arrival(self) -> float:
        """Seconds on the coordinator's clock."""
        return self.record.arrival

    @property
    def num_output(self) -> int:
        return len(self.output)

    @property
    def num_tokens(self) -> int:
        return self.prompt_len + len(self.output)

    def tokens_in(self, start: int, stop: int) -> Sequence[int]:
        """Those of its tokens."""
        known = self.prompt_len
        if stop <= known:
            return self.prompt[start:stop]
        return [*self.prompt[start:stop], *self.output[max(0, start - known) : stop - known]]

    @property
    def remaining_prefill(self) -> int:
        """Tokens that are still to be dispatched as chunks."""
        return max(0, self.prefill_target - self.num_dispatched)

    @property
    def in_flight(self) -> bool:
        return self.num_dispatched > self.num_completed

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def finish_reason_after(self, token: int) -> str | None:
        """Why the request ends with this token, its newest; None if it goes on. Stop strings are apart."""
        if self.stop_ids is not None and token in self.stop_ids and self.num_output >= self.params.min_tokens:
            return "stop"
        return "length" if self.num_tokens >= self.max_len else None

    def take_new_blocks(self) -> list[int]:
        """Blocks that the ranks have not been told of; they are told now."""
        new = self.blocks[self.num_blocks_sent :]
        self.num_blocks_sent = len(self.blocks)
        return new
