"""Policies: each decides what the next micro-batch holds. Pure Python, without torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...conf.policies import SchedulerConfig
from ..blocks import BlockPool
from .base import Limits, Scheduler
from .equal_time import EqualTime
from .orca_best import OrcaBest
from .orca_worst import OrcaWorst
from .order import ORDERS
from .prefill_first import PrefillFirst
from .request_level import RequestLevel
from .sarathi import Sarathi
from .token_budget import TokenBudget
from .token_throttle import TokenThrottle

POLICIES: dict[str, Callable[[Any, Limits, BlockPool], Scheduler]] = {
    "request_level": RequestLevel,
    "orca_worst": OrcaWorst,
    "orca_best": OrcaBest,
    "prefill_first": PrefillFirst,
    "sarathi": Sarathi,
    "token_budget": TokenBudget,
    "token_throttle": TokenThrottle,
    "equal_time": EqualTime,
}


def make_scheduler(config: SchedulerConfig, limits: Limits, pool: BlockPool) -> Scheduler:
    return POLICIES[config.name](config, limits, pool)


__all__ = ["ORDERS", "POLICIES", "Limits", "Scheduler", "make_scheduler"]
