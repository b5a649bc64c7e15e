"""Configures NCCL so that only the coordinator handles faults.

torch must not kill a rank or close its groups by itself, and a waiting rank must leave the device to other work.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Read by torch's ProcessGroupNCCL when a group is created. torchrun sets the first to "1" for its processes.
VARIABLES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # its watchdog would kill the process, or abort while graphs exist
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # the host never waits for a collective
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # the watchdog's monitor thread would kill the process
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # else it polls the store every second for failed ranks
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",  # after an error the watchdog sleeps 4 times as long, with a lock
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # the main thread gets the error too, and can report it
    "TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN": "0",  # can hang
}
_PIPELINE_CTAS = 2  # thread blocks per send or receive: a receive posted ahead spins on as many SMs


@contextmanager
def group_options() -> Iterator[str]:
    """Write the options of the groups to a file for Megatron, and yield its path."""
    # Megatron creates the options without a timeout, and passes the timeout separately.
    warnings.filterwarnings("ignore", message="backend_options._timeout was specified")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "groups.yaml"
        path.write_text(f"pp: {{max_ctas: {_PIPELINE_CTAS}}}\n")
        yield str(path)
