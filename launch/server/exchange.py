"""A request to the server with its answer, as far as it is noted."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .answers import Asked
    from .engine_client import Call

REFUSED = (401, 403, 429)
CLIENT_LEFT = 499  # nginx's status for an answer that its client did not wait for


@dataclass(slots=True)
class Exchange:
    """A request and its answer. `state` is what the application noted: the holder of the key, what was asked for.

    `route` is the path with the names of its parts, which are few, as `/v1/models/{name}`. `status` is that of an error
    within a stream, whose head has said 200. `began` is on the monotonic clock, in seconds.
    """

    method: str
    path: str
    id: str
    client: str = ""
    route: str = ""
    status: int = CLIENT_LEFT
    state: Mapping[str, Any] = field(default_factory=dict)
    raw_headers: Iterable[tuple[bytes, bytes]] = ()
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0

    @property
    def headers(self) -> dict[str, str]:
        """The request's headers, by their names in small letters."""
        return {name.decode("latin-1"): value.decode("latin-1") for name, value in self.raw_headers}

    @property
    def seconds(self) -> float:
        """How long the answer took."""
        return self.ended - self.began

    @property
    def error(self) -> str:
        """What a refusal said, where it quotes nothing of the request."""
        return self.state.get("error", "") if self.status >= 500 or self.status in REFUSED else ""

    @property
    def holder(self) -> str:
        """The holder of its key, "" where none is asked for or none was valid."""
        return self.state.get("holder") or ""

    @property
    def asked(self) -> Asked | None:
        """What a request for outputs asks for; None for others, and where it was refused."""
        return self.state.get("asked")

    @property
    def call(self) -> Call | None:
        """The outputs of such a request."""
        return self.state.get("call")

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompts."""
        return sum(map(len, self.asked.prompts)) if self.asked is not None and self.call is not None else 0

    @property
    def output_tokens(self) -> int:
        """Tokens that it got."""
        return sum(len(output.token_ids) for output in self.call.outputs) if self.call is not None else 0

    @property
    def ttft(self) -> float | None:
        """Seconds until its first token."""
        return None if self.call is None or self.call.first is None else self.call.first - self.call.arrival
