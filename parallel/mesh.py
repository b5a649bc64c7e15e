"""The rank grid: maps a rank to its pipeline stage and its tensor-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mesh:
    """A grid of `pp` stages with `tp` ranks each, and the position of `rank` in it.

    rank = stage * tp + tp_rank: the ranks of a stage are adjacent, so that they share a node.
    """

    pp: int
    tp: int
    rank: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.world_size, self

    @property
    def world_size(self) -> int:
        """The number of ranks, pp x tp."""
        return self.pp * self.tp

    @property
    def stage(self) -> int:
        """The stage of this rank, from 0."""
        return self.rank // self.tp

    @property
    def tp_rank(self) -> int:
        """The rank within its stage, from 0."""
        return self.rank % self.tp

    @property
    def is_first(self) -> bool:
        """Whether this rank is on the first stage, which embeds tokens."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank is on the last stage, which computes logits."""
        return self.stage == self.pp - 1

    def share_of(self, num_rows: int, tp_rank: int | None = None) -> range:
        """Return which of `num_rows` rows the last stage's rank `tp_rank` samples; None: this rank.

        The shares are contiguous and even. If there are any rows, the first rank has some.
        """
        place = self.tp_rank if tp_rank is None else tp_rank
        first, end = (-(-num_rows * i // self.tp) for i in (place, place + 1))
        return range(first, end)

    @property
    def previous(self) -> int:
        """The rank with the same tp rank on the previous stage."""
        return self.rank - self.tp

    @property
    def next(self) -> int:
        """The rank with the same tp rank on the next stage."""
        return self.rank + self.tp

    @property
    def tp_groups(self) -> list[list[int]]:
        """The ranks of each stage."""
        return [list(range(s * self.tp, (s + 1) * self.tp)) for s in range(self.pp)]

    @property
    def pp_groups(self) -> list[list[int]]:
        """The ranks with each tp rank, in stage order."""
        return [list(range(t, self.world_size, self.tp)) for t in range(self.tp)]
