"""Makes the requests of a benchmark from a `WorkloadConfig`: their prompts, output lengths and arrival times."""

from .make import make_workload
from .workload import Workload

__all__ = ["Workload", "make_workload"]
