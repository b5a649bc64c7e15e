"""A request in the coordinator: its tokens, and how many of them are dispatched and completed."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from collections.abc import Sequence

from ...conf.sampling import SamplingParams
from .block_table import BlockTable
from .messages import TokenLogprobs
from .prefix_cache import extend_hashes
from .request_record import RequestRecord


class Request:
    """A prompt with its sampling parameters, the tokens sampled for it, and its state.

    Its tokens are `prompt` followed by `output`. The KV of `num_completed` tokens is computed; the KV of
    `num_dispatched` tokens is computed or in flight. The request ends at `max_len` tokens (at most P + D), or with one
    of `stop_ids`. `prefill_target` tokens enter as chunks: the prompt, or after a preemption all tokens known by then.
    A request that arrives with `output` tokens from an earlier engine continues as after a preemption; its record
    counts them as prompt tokens. A prompt of `bytes` (in simulations) takes one byte per token. Admission orders read
    `user`, `priority` and `deadline` (of the first token, in seconds on the coordinator's clock), and keep their sort
    key in `order_key`.
    `prompt_logprobs` cover the prompt's tokens computed so far, except the first; None if not requested. `record`
    is the request's row in the run's record.

    `block_hashes` are the prefix-cache hashes of its full blocks, as far as known. The first `num_blocks_hashed` of its
    blocks have been offered to the cache. Requests with different `cache_salt` never share blocks. In models with
    sliding windows, `tables` has one block table per layer group; `blocks` are the first table's.
    """

    __slots__ = (
        "block_hashes",
        "blocks",
        "cache_salt",
        "deadline",
        "eos_token_ids",
        "finish_reason",
        "id",
        "max_len",
        "num_blocks_hashed",
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
        "prompt_logprobs",
        "record",
        "seed",
        "stop_ids",
        "tables",
    )

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
        priority: int = 0,
        cache_salt: str = "",
        block_hashes: Sequence[bytes] = (),
        output: Sequence[int] = (),
    ) -> None:
        self.id = id
        self.prompt: Sequence[int] = prompt if isinstance(prompt, bytes) else list(prompt)
        self.prompt_len = len(prompt)
        self.output = list(output)
        self.prompt_logprobs: list[TokenLogprobs] | None = None if params.prompt_logprobs is None else []
        self.params = params
        self.seed = seed
        self.eos_token_ids = eos_token_ids
        stop_ids = frozenset(params.stop_token_ids).union(() if params.ignore_eos else eos_token_ids)
        self.stop_ids: frozenset[int] | None = stop_ids or None
        longest = len(prompt) + params.max_tokens
        self.max_len = longest if max_model_len is None else min(longest, max_model_len)
        self.num_dispatched = 0
        self.num_completed = 0
        self.prefill_target = len(prompt) + len(output)
        self.blocks: list[int] = []
        self.tables: list[BlockTable] = []
        self.num_blocks_sent = 0
        self.num_blocks_hashed = 0
        self.cache_salt = cache_salt
        self.block_hashes = list(block_hashes)
        self.preemptions = 0
        self.finish_reason: str | None = None
        self.deadline = deadline
        self.order_key: float | None = None
        self.record = RequestRecord(id, self.prefill_target, arrival, user=user, priority=priority)

    def __repr__(self) -> str:
        return f"Request({self.id}, {self.num_completed}/{self.num_dispatched}/{self.num_tokens} of {self.max_len})"

    @property
    def arrival(self) -> float:
        """Seconds on the coordinator's clock."""
        return self.record.arrival

    @property
    def user(self) -> str:
        """The user who sent the request; "" if not given."""
        return self.record.user

    @property
    def priority(self) -> int:
        """The priority; lower is more urgent."""
        return self.record.priority

    @property
    def num_output(self) -> int:
        """The number of tokens sampled so far."""
        return len(self.output)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the prompt and of the output so far."""
        return self.prompt_len + len(self.output)

    def tokens_in(self, start: int, stop: int) -> Sequence[int]:
        """Return the request's tokens `start` .. `stop - 1`."""
        known = self.prompt_len
        if stop <= known:
            return self.prompt[start:stop]
        return [*self.prompt[start:stop], *self.output[max(0, start - known) : stop - known]]

    def targets_of(self, start: int, length: int) -> Sequence[int]:
        """Return the prompt token after each token of a chunk, if prompt log-probabilities are wanted."""
        found = self.prompt_logprobs
        if found is None or len(found) >= self.prompt_len - 1:
            return ()
        return self.prompt[start + 1 : start + length + 1]

    @property
    def remaining_prefill(self) -> int:
        """Number of tokens that are still to be dispatched as chunks."""
        return max(0, self.prefill_target - self.num_dispatched)

    @property
    def in_flight(self) -> bool:
        """Whether some of its tokens are in a micro-batch that has not completed."""
        return self.num_dispatched > self.num_completed

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.finish_reason is not None

    def finish_reason_after(self, token: int) -> str | None:
        """Return the finish reason after `token`, its newest; None if the request continues.

        Stop strings are checked elsewhere (`engine/stopping.py`).
        """
        if self.stop_ids is not None and token in self.stop_ids and self.num_output >= self.params.min_tokens:
            return "stop"
        return "length" if self.num_tokens >= self.max_len else None

    def hash_blocks(self, num_tokens: int, block_size: int) -> None:
        """Extend `block_hashes` to the full blocks of its first `num_tokens` tokens.

        A simulated prompt has no tokens to hash: its hashes are given, or it has none.
        """
        known = len(self.block_hashes) * block_size
        if num_tokens - known >= block_size and not isinstance(self.prompt, bytes):
            extend_hashes(self.block_hashes, self.tokens_in(known, num_tokens), block_size, self.cache_salt)

    def take_new_blocks(self) -> list[int]:
        """Return the blocks that have not been sent yet, and mark them as sent."""
        new = self.blocks[self.num_blocks_sent :]
        if self.tables:
            new = [block for table in self.tables for block in table.take_new()]
        self.num_blocks_sent = len(self.blocks)
        return new
