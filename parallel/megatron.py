"""The import of megatron.core, made quick and quiet; `groups.py` and `layers.py` take it from here.

megatron.core decorates functions with `torch.compile` on import, which costs seconds and compiles nothing that we
call; it also warns of GPU packages that inference does not need.
"""

from __future__ import annotations

import os
import warnings

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

with warnings.catch_warnings():
    warnings.filterwarnings(
        "ignore", message=".*(Transformer Engine|Apex|CUDA_DEVICE_MAX_CONNECTIONS|full scope is deprecated)"
    )
    from megatron.core import ModelParallelConfig, parallel_state, tensor_parallel

__all__ = ["ModelParallelConfig", "parallel_state", "tensor_parallel"]
