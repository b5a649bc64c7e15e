"""Imports megatron.core quickly and without warnings. `groups.py` and `layers.py` import it from here.

On import, megatron.core decorates functions with `torch.compile`. That takes seconds, and we call none of them. It
also warns about missing GPU packages that inference does not need.
"""

from __future__ import annotations

import os
import warnings

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

with warnings.catch_warnings():
    warnings.filterwarnings(
        "ignore", message=".*(Transformer Engine|Apex|absl|CUDA_DEVICE_MAX_CONNECTIONS|full scope is deprecated|escape)"
    )
    from megatron.core import ModelParallelConfig, parallel_state, tensor_parallel

__all__ = ["ModelParallelConfig", "parallel_state", "tensor_parallel"]
