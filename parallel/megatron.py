"""Imports megatron.core quickly and without warnings. `groups.py` and `layers.py` import it from here.

On import, megatron.core decorates functions with `torch.compile`. We call none of them, and importing the compiler
takes 0.8 s of CPU time per rank. It also warns about missing GPU packages that inference does not need.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def _as_it_is(function: Any = None, **options: Any) -> Any:
    return _as_it_is if function is None else function


_compile = torch.compile
torch.compile = _as_it_is  # type: ignore[assignment]
try:
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore",
            message=".*(Transformer Engine|Apex|absl|CUDA_DEVICE_MAX_CONNECTIONS|full scope is deprecated|escape)",
        )
        from megatron.core import ModelParallelConfig, parallel_state, tensor_parallel
finally:
    torch.compile = _compile

__all__ = ["ModelParallelConfig", "parallel_state", "tensor_parallel"]
