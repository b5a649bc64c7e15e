"""The bounds within which a policy fills micro-batches."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from dataclasses import dataclass

from ...conf.policies import Depth


@dataclass(frozen=True)
class Limits:
    """Bounds that the plan sets for a policy.

    `batch` is the maximum number of requests per micro-batch (B in the paper), `depth` the micro-batches in flight,
    `tile` the rows that a GEMM pads to, `num_stages` the number of pipeline stages. With `looks_ahead` (async
    scheduling) one more micro-batch is in flight: requests are scheduled before their newest token is known.
    """

    batch: int
    depth: Depth
    tile: int = 1
    num_stages: int = 1
    looks_ahead: bool = False

    @property
    def running(self) -> int:
        """Maximum number of requests that hold KV at once."""
        return self.batch * self.depth.most
