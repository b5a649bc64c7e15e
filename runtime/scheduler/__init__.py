"""What every policy is made of: import from here to write one of your own. Pure Python, without torch."""

from __future__ import annotations

from ...conf.policies import SchedulerConfig
from ..core.block_pool import BlockPool
from ..core.micro_batch import MicroBatch
from ..core.request import Request
from .base import Limits, Scheduler
from .waiting import ORDERS

__all__ = ["ORDERS", "BlockPool", "Limits", "MicroBatch", "Request", "Scheduler", "SchedulerConfig"]
