"""The rank grid: which stage and which tensor-parallel slice a rank is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mesh:
    """`pp` stages of `tp` ranks; rank = stage * tp + tp_rank, so the ranks of a stage are adjacent (one node)."""

    pp: int
    tp: int
    rank: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.world_size, self

    @property
    def world_size(self) -> int:
        return self.pp * self.tp

    @property
    def stage(self) -> int:
        return self.rank // self.tp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.pp - 1

    @property
    def previous(self) -> int:
        """The rank of the same slice on the stage before."""
        return self.rank - self.tp

    @property
    def next(self) -> int:
        """The rank of the same slice on the stage after."""
        return self.rank + self.tp

    @property
    def tp_groups(self) -> list[list[int]]:
        return [list(range(s * self.tp, (s + 1) * self.tp)) for s in range(self.pp)]

    @property
    def pp_groups(self) -> list[list[int]]:
        return [list(range(t, self.world_size, self.tp)) for t in range(self.tp)]
