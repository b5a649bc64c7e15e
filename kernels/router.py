"""A router's GEMM, top-k and softmax in one C++ call (`router.cpp`), for float32 and bfloat16 on a CPU."""

from __future__ import annotations

from ctypes import CDLL

import torch
from torch import Tensor

from .cpp_library import ELEMENTS, CppFile, addresses, find
from .experts import pack_words

_ROUTER = CppFile("router", route="piippiipp")


class PackedRouter:
    """The weight [E, H] and bias [E] of a router whose weights are the softmax of each token's top-k logits."""

    def __init__(self, weight: Tensor, bias: Tensor | None, library: CDLL) -> None:
        self._route, self._size, self._bias = library.route, len(weight), bias
        self._words = pack_words(weight[None, None], 64)

    def __call__(self, x_TH: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return each token's top-k experts, [T, k] int64, and their softmax, [T, k] float32."""
        x_TH = x_TH.contiguous()
        picked, weights = torch.empty(len(x_TH), k, dtype=torch.int64), torch.empty(len(x_TH), k)
        x, *rest = addresses(x_TH, self._words, self._bias)
        self._route(x, *x_TH.shape, *rest, self._size, k, *addresses(picked, weights))
        return picked, weights


def pack_router(weight: Tensor, bias: Tensor | None) -> PackedRouter | None:
    """Pack a router's weight; None if torch's operators have to be used. The weight is copied: it is small."""
    if weight.device.type != "cpu" or weight.dtype not in ELEMENTS or weight.shape[1] % 32:
        return None
    library = find(_ROUTER, weight.dtype)
    return None if library is None else PackedRouter(weight.detach(), bias, library)
