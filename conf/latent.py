"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): `model.architecture.latent.KEY=VALUE`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .errors import check
from .ranges import Within, check_ranges

_KEY = "model.architecture.latent"
_SIZES = Within(1, (1 << 20) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Dimensions of MLA, whose cache holds the compressed KV and one RoPE key shared by all heads.

    A head's key is `head_dim` elements projected up from the compressed KV, followed by the RoPE key.
    """

    rank: Annotated[int, _SIZES]
    """rank of the compressed KV (kv_lora_rank)"""
    query_rank: Annotated[int | None, _SIZES] = None
    """rank of the compressed query (q_lora_rank); null: queries are projected directly from the hidden state"""
    head_dim: Annotated[int, _SIZES]
    """elements of a head's query and key without RoPE (qk_nope_head_dim)"""
    rotary_dim: Annotated[int, _SIZES]
    """elements of a head's query and key with RoPE (qk_rope_head_dim); all heads share the key's"""
    value_dim: Annotated[int, _SIZES]
    """elements of a head's value (v_head_dim)"""
    down_bias: bool = False
    """bias on the down projections of KV and queries"""
    neighbours_turn: bool = True
    """interleaved RoPE: elements 2 i and 2 i + 1 are a pair, not i and i + rotary_dim / 2"""

    def __post_init__(self) -> None:
        check_ranges(self, f"{_KEY}.")
        check(f"{_KEY}.rotary_dim", self.rotary_dim, self.rotary_dim % 2 == 0, "even, as RoPE rotates pairs")

    @property
    def cached(self) -> int:
        """Cached elements per token and layer."""
        return self.rank + self.rotary_dim

    @property
    def query_dim(self) -> int:
        """Elements of a head's query."""
        return self.head_dim + self.rotary_dim
