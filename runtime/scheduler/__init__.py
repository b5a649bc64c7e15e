"""Building blocks of scheduling policies; import from here to write your own. Pure Python, without torch."""

from __future__ import annotations

from ...conf.policies import SchedulerConfig
from ..core.block_pool import BlockPool
from ..core.micro_batch import MicroBatch
from ..core.request import Request
from .base import Scheduler
from .limits import Limits
from .waiting import ORDERS

__all__ = ["ORDERS", "BlockPool", "Limits", "MicroBatch", "Request", "Scheduler", "SchedulerConfig"]
