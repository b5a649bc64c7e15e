"""The record of one request, kept by the coordinator."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class RequestRecord:
    """The record of one request, for its row in `requests.csv`. Times are seconds on the coordinator's clock."""

    request: int
    prompt_tokens: int
    arrival: float
    token_times: list[float] = field(default_factory=list)
    first_dispatched: float | None = None
    finished: float | None = None
    finish_reason: str | None = None
    preemptions: int = 0
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    kv_transfer: tuple[float, float] | None = None  # begin and end, if its KV came from another pipeline
    user: str = ""  # if the workload or the client specifies one
    priority: int = 0  # lower is more urgent
    earlier_tokens: int = 0  # received before a recorded window; `token_times` are then of the window

    @property
    def output_tokens(self) -> int:
        """The number of tokens that the request received."""
        return len(self.token_times)
