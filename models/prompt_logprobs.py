"""Log-probabilities of given tokens, for prompt log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from .ranking import logprobs_of, slices
from .sampling import SampledToken
from .transfers import Download, upload


class PendingLogprobs:
    """Log-probabilities that are being computed on the device.

    Args:
        logits_RV: float32, V wide.
        rows: rows of the logits.
        tokens: the token of each row.
        num_tops: the number of most likely tokens to return per row.
    """

    def __init__(self, logits_RV: Tensor, rows: Sequence[int], tokens: Sequence[int], num_tops: Sequence[int]) -> None:
        self._tokens = tokens
        self._num_tops = num_tops
        self._downloads = []
        for part in slices(list(range(len(rows))), logits_RV.shape[-1], logits_RV.device):
            of_part = [np.array([values[i] for i in part], dtype=np.int64) for values in (rows, tokens)]
            rows_S, tokens_S = upload(of_part, logits_RV.device)
            computed = logprobs_of(logits_RV[rows_S], tokens_S, max(num_tops[i] for i in part))
            self._downloads.append(Download(computed))

    def read(self) -> list[SampledToken]:
        """Wait for the device, and return each row's token with its log-probabilities. Thread-safe."""
        columns = [[array.tolist() for array in download.read()] for download in self._downloads]
        each = (row for part in columns for row in zip(*part, strict=True))
        return [SampledToken.of(*given) for given in zip(self._tokens, self._num_tops, each, strict=True)]
