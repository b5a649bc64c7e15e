"""Attention with logit soft-capping (Gemma 2) or sinks (gpt-oss), by torch's GEMMs with scores in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from .backend import AttentionSizes
from .sdpa import PaddedPlan, SdpaBackend, SdpaPlan, chunk_mask, read_padded, read_slots

_MOST_SCORES = 1 << 23  # in memory at once, float32


class ScoresBackend(SdpaBackend):
    """Plans like `SdpaBackend`, but materializes the scores.

    Args:
        softcap: scores s become softcap * tanh(s / softcap); None: no capping.
    """

    def __init__(self, sizes: AttentionSizes, softcap: float | None) -> None:
        super().__init__(sizes)
        self.softcap = softcap
        self.about = "torch's products, for capped scores or sinks" if sizes.device.type == "cuda" else ""

    def attend(
        self, q_TKGD: Tensor, keys_SKD: Tensor, values_SKD: Tensor, plan: SdpaPlan, sinks: Tensor | None = None
    ) -> Tensor:
        """See `AttentionBackend.attend`. `sinks`: per head, [K * G], an extra score in the softmax without a value."""
        K, G = q_TKGD.shape[1:3]
        out, own_sinks = q_TKGD.new_empty(q_TKGD.shape), None if sinks is None else sinks.view(K, G, 1)
        decodes = [] if isinstance(plan.decodes, PaddedPlan) else plan.decodes
        for segment in (*plan.chunks, *decodes):
            keys, values = (read_slots(cache, segment.slots, q_TKGD) for cache in (keys_SKD, values_SKD))
            first, last = segment.rows.start, segment.rows.stop
            mask = chunk_mask(0, last - first, 0, self.sizes) if segment.is_causal else segment.mask
            step = max(1, _MOST_SCORES // (K * G * keys.shape[2]))
            for row in range(first, last, step):
                rows = slice(row, min(row + step, last))
                q = q_TKGD[rows].permute(1, 2, 0, 3)  # [K, G, R, D]
                own = None if mask is None else mask[row - first : rows.stop - first]
                out[rows] = self._weigh(q[None], keys, values, own, own_sinks)[0].permute(2, 0, 1, 3)
        if isinstance(padded := plan.decodes, PaddedPlan):
            keys, values = (read_padded(cache, padded, q_TKGD) for cache in (keys_SKD, values_SKD))
            q = q_TKGD[padded.rows].unsqueeze(3)  # [B, K, G, 1, D]
            out[padded.rows] = self._weigh(q, keys, values, padded.mask[:, None], own_sinks)[:, :, :, 0]
        return out.view(len(out), -1)

    def _weigh(
        self, q_BKGRD: Tensor, keys_BKSD: Tensor, values_BKSD: Tensor, mask: Tensor | None, sinks_KG1: Tensor | None
    ) -> Tensor:
        """Return the attention output of R queries per head, [B, K, G, R, D]. `mask` is added to [B, K, G, R, S]."""
        B, K, G, R, D = q_BKGRD.shape
        scores = q_BKGRD.reshape(B, K, G * R, D) @ keys_BKSD.transpose(2, 3)
        scores = scores.view(B, K, G, R, -1).float().mul_(D**-0.5)
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        if mask is not None:
            scores += mask
        if sinks_KG1 is not None:
            sinks = sinks_KG1.float()[None, ..., None].expand(B, K, G, R, 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = scores.softmax(-1)
        if sinks_KG1 is not None:
            weights = weights[..., :-1]
        weights = weights.to(values_BKSD.dtype).reshape(B, K, G * R, -1)
        return (weights @ values_BKSD).view(B, K, G, R, D)
