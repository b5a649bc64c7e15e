"""How many bytes of tensors live at once on the fake CUDA device."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Finds the `peak`, in bytes, of what operators allocate within this context. Their own work memory is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        self._live = {key: each for key, each in self._live.items() if not each[0].expired()}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.device.type == "cuda":
                storage = x.untyped_storage()
                if storage._cdata not in given:
                    self._live.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return out
