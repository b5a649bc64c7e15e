"""A request to the server and its answer, for logs, metrics and traces."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .answers import Asked
    from .engine_client import Call
    from .route import Route

REFUSED = (401, 403, 429)
CLIENT_LEFT = 499  # nginx's status for a client that disconnects before its answer


@dataclass(slots=True)
class Exchange:
    """A request and its answer. `state` is what the application recorded: the key's holder, the parsed request.

    If a stream fails after its head was sent with 200, `status` is the error's. `began` is on the monotonic clock, in
    seconds.
    """

    method: str
    path: str
    id: str
    client: str = ""
    route: Route | None = None  # None: the path is unknown, or the request never reached the application
    status: int = CLIENT_LEFT
    state: Mapping[str, Any] = field(default_factory=dict)
    raw_headers: Iterable[tuple[bytes, bytes]] = ()
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0

    @property
    def label(self) -> str:
        """The path template in metrics, such as `/v1/models/{name}`, for a low cardinality."""
        return self.route.path if self.route is not None else "refused" if self.method == "-" else "other"

    @property
    def headers(self) -> dict[str, str]:
        """The request's headers by name."""
        return {name.decode("latin-1"): value.decode("latin-1") for name, value in self.raw_headers}

    @property
    def seconds(self) -> float:
        """How long the answer took."""
        return self.ended - self.began

    @property
    def error(self) -> str:
        """The error message, if it does not quote the request; else empty."""
        return self.state.get("error", "") if self.status >= 500 or self.status in REFUSED else ""

    @property
    def holder(self) -> str:
        """The holder of its key; "" if no key is required or it was invalid."""
        return self.state.get("holder") or ""

    @property
    def asked(self) -> Asked | None:
        """The parsed generation request; None for others, and if it was refused."""
        return self.state.get("asked")

    @property
    def call(self) -> Call | None:
        """The outputs of a generation request."""
        return self.state.get("call")

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return sum(map(len, self.asked.prompts)) if self.asked is not None and self.call is not None else 0

    @property
    def output_tokens(self) -> int:
        """Number of generated tokens."""
        return sum(len(output.token_ids) for output in self.call.outputs) if self.call is not None else 0

    @property
    def ttft(self) -> float | None:
        """Seconds until its first token."""
        return None if self.call is None or self.call.first is None else self.call.first - self.call.arrival
