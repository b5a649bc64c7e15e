"""Closed loops, as runs of requests take them."""

from __future__ import annotations

from gapless.conf.workloads import FixedConfig


def loop(clients: int | None, *, think_ms: float = 0.0, duration_s: float | None = None) -> FixedConfig:
    """Make the config of a workload of so many clients; None: no closed loop."""
    return FixedConfig(max_concurrency=clients, think_ms=think_ms, duration_s=duration_s)
