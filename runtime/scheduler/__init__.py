"""Policies: each decides what the next micro-batch holds. Pure Python, without torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...conf.policies import SchedulerConfig
from ..blocks import BlockPool
from .base import Limits, Scheduler
from .orca_best import OrcaBest
from .request_level import RequestLevel
from .sarathi import Sarathi

POLICIES: dict[str, Callable[[Any, Limits, BlockPool], Scheduler]] = {
    "orca_best": OrcaBest,
    "request_level": RequestLevel,
    "sarathi": Sarathi,
}


def make_scheduler(config: SchedulerConfig, limits: Limits, pool: BlockPool) -> Scheduler:
    return POLICIES[config.name](config, limits, pool)


__all__ = ["POLICIES", "Limits", "Scheduler", "make_scheduler"]
