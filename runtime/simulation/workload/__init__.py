"""Makes the requests of a benchmark from a `WorkloadConfig`: their prompts, output lengths and arrival times."""

from .clients import Clients
from .make import make_workload
from .workload import WorkItem, Workload

__all__ = ["Clients", "WorkItem", "Workload", "make_workload"]
