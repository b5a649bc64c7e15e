"""An LM-head weight tied to the embedding that cannot be packed with readable rows.

It is float32, or the vocabulary is not a multiple of 64 (GPT-2), or oneDNN's layout is unknown.

torch's GEMM packs the weight at each call. For up to 64 rows this takes two to four times as long as reading it once
(LM head of GPT-2, 50,257 x 768, two cores).
"""

from __future__ import annotations

from ctypes import CDLL

import torch
import torch.nn.functional as F
from torch import Tensor

from .cpp_library import ELEMENTS, CppFile, addresses, find

_ROW_WEIGHT = CppFile("row_weight", linear="pppiii")
_MOST_ROWS = {torch.float32: 96, torch.bfloat16: 8}  # for more rows, torch's GEMM is faster despite packing the weight


class RowWeight:
    """An unpacked weight [out, in] on a CPU."""

    def __init__(self, weight: Tensor, library: CDLL) -> None:
        assert weight.is_contiguous()
        self._weight, self._linear = weight, library.linear

    def linear(self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """Return x @ weight.T + bias + residual, [T, out]."""
        if not 0 < len(x) <= _MOST_ROWS[x.dtype]:
            out = F.linear(x, self._weight, bias)
            return out if residual is None else out.add_(residual)
        x, out = x.contiguous(), x.new_empty(len(x), len(self._weight))
        self._linear(*addresses(x, self._weight, out), *x.shape, len(self._weight))
        for term in (bias, residual):
            if term is not None:
                out.add_(term)
        return out


def take_rows(weight: Tensor) -> RowWeight | None:
    """Make the GEMM of an unpacked weight; None if torch's own has to be used."""
    if weight.device.type != "cpu" or weight.dtype not in ELEMENTS:
        return None
    library = find(_ROW_WEIGHT, weight.dtype)
    return None if library is None else RowWeight(weight.detach(), library)
