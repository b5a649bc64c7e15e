"""The lead of a search's winner over the next setting, and whether it outlasts the error of the cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .error_range import ErrorRange
from .search_result import Finalist
from .space import Candidate
from .tables import range_text


@dataclass(frozen=True, slots=True)
class Lead:
    """By how much the winner carries more than the next setting that carries less, and whether that outlasts the error.

    Attributes:
        over: The other setting.
        own: The winner's capacity at both ends of the error.
        other: That of the other setting.
        share: How much less it carries, as a share of the winner's capacity.
        same_grid: Both have the same tensor-parallel size and stages, so that their times are off alike.
    """

    over: Candidate
    own: ErrorRange
    other: ErrorRange
    share: float
    same_grid: bool

    @property
    def if_alike(self) -> bool:
        """Whether the winner carries more at both ends, if the times of both are off alike."""
        return self.own.low > self.other.low and self.own.high > self.other.high

    @property
    def if_apart(self) -> bool:
        """Whether it carries more even if its own times are as long and the other's as short as the error allows."""
        return self.own.low > self.other.high

    @property
    def survives(self) -> bool:
        """Whether the lead outlasts every error that is assumed to be possible."""
        return self.if_alike and (self.same_grid or self.if_apart)

    @property
    def text(self) -> str:
        """Say it, with the assumption."""
        ranges = f"{range_text(self.other)} against {range_text(self.own)} requests/s"
        if not self.if_alike:
            why = "if stage times are off, it may carry as much or more"
        elif self.same_grid:
            why = "if stage times are off, it still carries less, as both are off alike on the same grid"
        elif self.if_apart:
            why = "if stage times are off, it still carries less, even if the two grids are off in opposite directions"
        else:
            why = "if stage times are off, it still carries less where both grids are off alike, else perhaps not"
        return f"{self.over.label} carries {self.share:.0%} less; {why} ({ranges})"

    @property
    def numbers(self) -> dict[str, Any]:
        """What `tune.json` holds of it."""
        return {
            "over": self.over.label,
            "share": self.share,
            "same_grid": self.same_grid,
            "if_alike": self.if_alike,
            "if_apart": self.if_apart,
            "survives": self.survives,
            "note": self.text,
        }


def lead_of(finalists: Sequence[Finalist]) -> Lead | None:
    """Return the lead of the first of `finalists`; None if no other carries less or the error is not known."""
    for finalist in finalists[1:]:
        first = finalists[0]
        own, other = first.off, finalist.off
        if finalist.verdict != "less" or own is None or other is None:
            continue
        grids = [(each.candidate.tp, each.candidate.pp) for each in (first, finalist)]
        return Lead(
            over=finalist.candidate,
            own=own,
            other=other,
            share=1 - finalist.interval.mean / first.interval.mean,
            same_grid=grids[0] == grids[1],
        )
    return None
