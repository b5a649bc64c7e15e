"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): `model.architecture.latent.KEY=VALUE`."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import check

_KEY = "model.architecture.latent"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """The sizes of latent attention, whose cache holds a latent and a rotated key that all heads share.

    A head's key is `head_dim` elements made of the latent, followed by the rotated key.
    """

    rank: int
    """width of the latent that the keys and values of all heads are made of"""
    query_rank: int | None = None
    """width of what all queries are made of; null: the hidden size, by one matrix"""
    head_dim: int
    """elements of a head's query and key that do not turn"""
    rotary_dim: int
    """elements of a head's query and key that turn; the key's are the same for all heads"""
    value_dim: int
    """elements of a head's value"""
    down_bias: bool = False
    """bias on the projections to the latent and to what queries are made of"""
    neighbours_turn: bool = True
    """the checkpoint's elements 2 i and 2 i + 1 turn together, not i and i + rotary_dim / 2"""

    def __post_init__(self) -> None:
        for name in ("rank", "head_dim", "rotary_dim", "value_dim"):
            check(f"{_KEY}.{name}", getattr(self, name), 1 <= getattr(self, name) < 1 << 20, "1 to 1048575")
        width = self.query_rank
        check(f"{_KEY}.query_rank", width, width is None or 1 <= width < 1 << 20, "null or 1 to 1048575")
        check(f"{_KEY}.rotary_dim", self.rotary_dim, self.rotary_dim % 2 == 0, "even, for positions turn pairs")

    @property
    def cached(self) -> int:
        """Elements of the cache for each token and layer."""
        return self.rank + self.rotary_dim

    @property
    def query_dim(self) -> int:
        """Elements of a head's query."""
        return self.head_dim + self.rotary_dim
