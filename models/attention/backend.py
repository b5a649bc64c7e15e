"""The protocol through which a decoder layer computes attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from ..batch import RaggedBatch


class FixedPlans(Protocol):
    """Plans for decodes alone whose tensors stay where they are, so that a CUDA graph may hold attention.

    `bounds` has the most keys of a row by plan, ascending.
    """

    bounds: Sequence[int]

    def of(self, rows: int, bound: int) -> Any:
        """Return the plan for `rows` rows of at most `bound` keys, which goes by what was loaded last."""
        ...

    def load(self, plan: Any, rows: int) -> int | None:
        """Copy a micro-batch's plan, padded to `rows` rows, and return its bound.

        None: it is not of decodes alone, or exceeds the bounds.
        """
        ...


class AttentionBackend(Protocol):
    """Computes causal attention of a ragged batch over the paged KV cache, separately for chunks and for decodes.

    `about` says in a line which backend it is, and why this one was chosen; empty on a CPU.
    """

    about: str

    def plan(self, batch: RaggedBatch) -> Any:
        """Compute what the layers share for a micro-batch: slots and masks. Called once a micro-batch."""
        ...

    def attend(self, q_TKGD: Tensor, keys_SKD: Tensor, values_SKD: Tensor, plan: Any) -> Tensor:
        """Compute one layer's attention: queries [T, K, G, D], with G query heads a KV head, to [T, K * G * D].

        The keys and values of this batch must be in the cache already.
        """
        ...

    def fixed_plans(self, max_rows: int, max_keys: int, scratch_block: int) -> FixedPlans | None:
        """Make plans for up to `max_rows` decodes over up to `max_keys` keys each. None: this backend has none.

        A row that pads reads a key of `scratch_block`, which no request owns.
        """
        return None
