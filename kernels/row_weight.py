"""The weight of an LM head that is the embedding too, where it cannot be packed so that rows can be read.

It is float32, or the vocabulary is no multiple of 64, as GPT-2's, or oneDNN's layout is not known.

torch's product packs it anew at each call. For up to 64 rows that takes two to four times as long as to read it once
(LM head of GPT-2, 50,257 x 768, two cores).
"""

from __future__ import annotations

from ctypes import CDLL

import torch
import torch.nn.functional as F
from torch import Tensor

from .cpp_library import ELEMENTS, addresses, find

_MOST_ROWS = {torch.float32: 96, torch.bfloat16: 8}  # torch's product packs the weight, which more rows are worth


class RowWeight:
    """A weight [out, in] as it was loaded, on a CPU."""

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
    """Make the product of a weight that stays as it is; None where torch's own must do."""
    if weight.device.type != "cpu" or weight.dtype not in ELEMENTS:
        return None
    library = find("row_weight", weight.dtype, linear="pppiii")
    return None if library is None else RowWeight(weight.detach(), library)
