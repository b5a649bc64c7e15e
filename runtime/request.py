"""A request's life in the coordinator: its tokens, and how far they are dispatched and completed."""

from __future__ import annotations

from ..conf.sampling import SamplingParams


class Request:
    """Prompt tokens plus sampling parameters, and what has become of them.

    `tokens` are the prompt's and then the sampled ones. `num_dispatched` of them have their KV computed or under way,
    `num_completed` have it for sure; the difference is in flight. `prefill_target` tokens enter as chunks: the
    prompt, or after a preemption all tokens known by then. `user` and `deadline` (of the first token, seconds on the
    coordinator's clock) are for the orders that ask for them; `order_key` is the order's.
    """

    __slots__ = (
        "arrival",
        "blocks",
        "deadline",
        "eos_token_ids",
        "finish_reason",
        "id",
        "max_output",
        "num_blocks_sent",
        "num_completed",
        "num_dispatched",
        "order_key",
        "params",
        "preemptions",
        "prefill_target",
        "prompt_len",
        "seed",
        "tokens",
        "user",
    )  # fmt: skip

    def __init__(
        self,
        id: int,
        prompt: list[int],
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
        self.tokens = list(prompt)
        self.prompt_len = len(prompt)
        self.params = params
        self.arrival = arrival
        self.seed = seed
        self.eos_token_ids = eos_token_ids
        room = params.max_tokens if max_model_len is None else max_model_len - len(prompt)
        self.max_output = min(params.max_tokens, room)
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

    def __repr__(self) -> str:
        return f"Request({self.id}, {self.num_completed}/{self.num_dispatched}/{len(self.tokens)} of {self.max_len})"

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def max_len(self) -> int:
        """Most tokens that this request can come to: P + D at the longest."""
        return self.prompt_len + self.max_output

    @property
    def remaining_prefill(self) -> int:
        """Tokens that are still to be dispatched as chunks."""
        return max(0, self.prefill_target - self.num_dispatched)

    @property
    def in_flight(self) -> bool:
        return self.num_dispatched > self.num_completed

    @property
    def is_decode_ready(self) -> bool:
        """Prefilled, and its last token has been sampled but not dispatched."""
        return self.num_dispatched >= self.prefill_target and self.num_dispatched == len(self.tokens) - 1

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def finish_reason_after(self, token: int) -> str | None:
        """Why the request ends with this token, the newest of `tokens`; None if it goes on. Stop strings are apart."""
        if self.num_output >= self.params.min_tokens:
            if token in self.eos_token_ids and not self.params.ignore_eos:
                return "stop"
            if token in self.params.stop_token_ids:
                return "stop"
        return "length" if self.num_output >= self.max_output else None
