"""Sets NCCL up for ranks whose coordinator alone says what a fault is.

torch must not end a rank by itself, nor close its groups, and a rank that waits must leave the device to the others.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# What torch's ProcessGroupNCCL reads as a group is made. torchrun sets the first one to "1" for its processes.
VARIABLES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # its watchdog would end the process, or abort while graphs live
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # the host never waits for a collective
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # a thread that watches the watchdog would end the process
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # else it asks the store each second whether a rank has failed
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",  # after an error the watchdog sleeps four times as long, with a lock
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # the main thread has the error too, and can report it
    "TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN": "0",  # can hang
}
_PIPELINE_CTAS = 2  # thread blocks of a send or receive: one that was posted ahead spins on as many SMs


@contextmanager
def group_options() -> Iterator[str]:
    """Write the options of the groups to a file for Megatron, and yield its path."""
    # Megatron makes the options without a timeout, and gives the timeout beside them.
    warnings.filterwarnings("ignore", message="backend_options._timeout was specified")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "groups.yaml"
        path.write_text(f"pp: {{max_ctas: {_PIPELINE_CTAS}}}\n")
        yield str(path)
