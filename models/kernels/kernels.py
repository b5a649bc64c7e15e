"""The protocol of a layer's small operators, and torch's own ones, which run on any device."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from ..rope import rotate


class Kernels(Protocol):
    """Computes what a layer does between its matrix products and attention.

    Sizes: T tokens, H hidden size, F feed-forward size, K KV heads with G query heads each, D elements of a head, S
    slots of the KV cache.

    `no_cpp` says why these are not the C++ operators (on CUDA: Triton's), which are faster, where the device could run
    them.
    """

    no_cpp: str

    def norm(
        self,
        x_TH: torch.Tensor,
        added_TH: torch.Tensor | None,
        weight_H: torch.Tensor,
        bias_H: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """Add `added_TH` to x, in place, and return the norm of the sum, [T, H].

        It is x / rms(x) * weight (RMSNorm), and with a bias (x - mean(x)) / std(x) * weight + bias (LayerNorm).
        """
        ...

    def gated_silu(self, hidden_TF: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up, [T, F], of [gate; up], [T, 2 F]. May write to its input."""
        ...

    def rotate_and_write(
        self,
        qk_TKED: torch.Tensor,
        values_TKD: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor] | None,
        slots_T: torch.Tensor,
        key_cache_SKD: torch.Tensor,
        value_cache_SKD: torch.Tensor,
        out_TKGD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rotate queries and keys by position, and write keys and values to their slots of the cache.

        Args:
            qk_TKED: Queries and keys: E = G + 1, and the last of each group is the key.
            values_TKD: Values, one for each key.
            rope: Cosines and sines, each [T, 1, 1, D / 2]; None: no rotation.
            slots_T: The slot of each token in the cache.
            key_cache_SKD: Keys of all slots, to write to.
            value_cache_SKD: Values of all slots, to write to.
            out_TKGD: Where to write the queries; None: anywhere.

        Returns:
            The queries, [T, K, G, D].
        """
        ...


class TorchKernels:
    """Calls torch's operators."""

    def __init__(self, no_cpp: str = "") -> None:
        self.no_cpp = no_cpp

    def norm(
        self,
        x_TH: torch.Tensor,
        added_TH: torch.Tensor | None,
        weight_H: torch.Tensor,
        bias_H: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """See `Kernels.norm`."""
        if added_TH is not None:
            x_TH.add_(added_TH)
        if bias_H is None:
            return F.rms_norm(x_TH, weight_H.shape, weight_H, eps)
        return F.layer_norm(x_TH, weight_H.shape, weight_H, bias_H, eps)

    def gated_silu(self, hidden_TF: torch.Tensor) -> torch.Tensor:
        """See `Kernels.gated_silu`."""
        gate, up = hidden_TF.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def rotate_and_write(
        self,
        qk_TKED: torch.Tensor,
        values_TKD: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor] | None,
        slots_T: torch.Tensor,
        key_cache_SKD: torch.Tensor,
        value_cache_SKD: torch.Tensor,
        out_TKGD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Kernels.rotate_and_write`."""
        if rope is not None:
            qk_TKED = rotate(qk_TKED, *rope)
        key_cache_SKD.index_copy_(0, slots_T, qk_TKED[:, :, -1])
        value_cache_SKD.index_copy_(0, slots_T, values_TKD)
        queries = qk_TKED[:, :, :-1]
        return queries if out_TKGD is None else out_TKGD.copy_(queries)
