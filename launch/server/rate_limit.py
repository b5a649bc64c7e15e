"""Rate limits per API key: requests per minute, and prompt and output tokens per minute."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from .errors import ApiError

_MINUTE_S = 60.0
_ROUNDING_S = 1e-6  # tolerance, so that a client that waits as long as Retry-After is admitted
Clock = Callable[[], float]  # seconds


class _Allowance:
    """A token bucket with a capacity of one minute. It may be overdrawn."""

    def __init__(self, most: int, now: float) -> None:
        self._rate = most / _MINUTE_S
        self._most = most
        self._left = float(most)
        self._at = now

    def wait(self, now: float) -> float:
        """Return the seconds until at least one unit is available."""
        self._left = min(self._most, self._left + (now - self._at) * self._rate)
        self._at = now
        return max(0.0, (1 - self._left) / self._rate)

    def take(self, amount: float) -> None:
        self._left -= amount


class RateLimits:
    """Counts per key holder; if no keys are set, all clients share one count.

    A request is admitted while tokens are left. Its prompt tokens are taken then, its output tokens at the end. So a
    long request may overdraw the bucket, and the next one waits longer.

    Args:
        requests: maximum per minute; None: no limit.
        tokens: maximum per minute; None: no limit.
        clock: time in seconds.
    """

    def __init__(self, requests: int | None = None, tokens: int | None = None, clock: Clock = time.monotonic) -> None:
        self._most = {
            f"serve.{name}": most
            for name, most in (("requests_per_minute", requests), ("tokens_per_minute", tokens))
            if most is not None
        }
        self._clock = clock
        self._left: dict[tuple[str, str], _Allowance] = {}

    def admit(self, holder: str, prompt_tokens: int) -> None:
        """Admit a holder's request.

        Raises:
            ApiError: 429; nothing is counted.
        """
        now = self._clock()
        found = {key: self._left.setdefault((key, holder), _Allowance(most, now)) for key, most in self._most.items()}
        for key, allowance in found.items():
            if (seconds := allowance.wait(now)) > _ROUNDING_S:
                raise ApiError(
                    429,
                    f"Rate limit reached: {key}={self._most[key]} is exhausted. Please try again in {seconds:.1f}s.",
                    code="rate_limit_exceeded",
                    headers={"retry-after": str(math.ceil(seconds))},
                )
        for key, allowance in found.items():
            allowance.take(1 if key == "serve.requests_per_minute" else prompt_tokens)

    def spend(self, holder: str, output_tokens: int) -> None:
        """Count a request's output tokens."""
        if (allowance := self._left.get(("serve.tokens_per_minute", holder))) is not None:
            allowance.take(output_tokens)
