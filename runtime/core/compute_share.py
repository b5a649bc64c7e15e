"""Compute and bandwidth utilization of a stage in one phase. Data only."""

from __future__ import annotations

from typing import Any

import msgspec


class ComputeShare(msgspec.Struct, frozen=True, array_like=True):
    """Utilization of a stage in micro-batches of one phase: `prefill` (chunks only), `decode` (decodes only), `mixed`.

    `seconds` is the measured compute time, `floor_seconds` the time at the machine's best rates. `mfu`: FLOPs over what
    the ranks' GEMM rate would allow in that time. `bandwidth_share`: bytes that must be read, over what the memory
    bandwidth would allow. Both rates are summed over the stage's ranks.
    """

    stage: int
    phase: str
    micro_batches: int
    seconds: float
    floor_seconds: float
    mfu: float
    bandwidth_share: float
    gemm_tflops: float
    memory_gigabytes_per_s: float

    def summary(self) -> dict[str, Any]:
        """Return the entry of `compute` in `summary.json`."""
        return msgspec.structs.asdict(self)
