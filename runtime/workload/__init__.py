"""Which requests a benchmark sends, and when: from a `WorkloadConfig` to requests with lengths and arrivals."""

from .make import make_workload
from .workload import WorkItem, Workload

__all__ = ["WorkItem", "Workload", "make_workload"]
